# GH200 nodes on a Slingshot network (HPE Cray EX): the wheel's NCCL with the libfabric plug-in of the module.
# Source it through DEEPY_PROFILE=gh200-slingshot; adapt the module versions to what your system has.

module purge
module load PrgEnv-cray cuda/12.6 brics/aws-ofi-nccl/1.8.1

# The NCCL that torch was built for must be found before the system's older one.
for library in .venv/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2; do
    if [ -f "$library" ]; then
        export LD_PRELOAD="$PWD/$library"
    fi
done

export TORCH_CUDA_ARCH_LIST=9.0
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export NCCL_NET="AWS Libfabric"
export NCCL_SOCKET_IFNAME=hsn
export NCCL_CROSS_NIC=1
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_COLLNET_ENABLE=0
export FI_PROVIDER=cxi
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DISABLE_HOST_REGISTER=1
