# Deepy with the versions that its tests ran with.
#   docker build -t deepy .                                        for NVIDIA GPUs, x86-64 or Arm (GH200)
#   docker build -t deepy --build-arg TORCH=--cpu --build-arg BASE=ubuntu:24.04 .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/runs" deepy python deepy.py train.py configs/tiny.yml save=/runs/tiny
# BASE needs the CUDA toolkit (`devel`): fused optimizers and optional features compile with it.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}

# Features of requirements/, such as "flashattention transformerengine": they compile for up to an hour.
ARG TORCH="--cuda cu130"
ARG FEATURES=""
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 VENV=/opt/venv PATH=/opt/venv/bin:$PATH

# Versions of Debian packages follow the base image.
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends \
        build-essential ca-certificates git libibverbs1 librdmacm1 openssh-client pdsh python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir --break-system-packages uv==0.13.9

WORKDIR /deepy
COPY requirements requirements
COPY megatron megatron
COPY tools/check_environment.py tools/
COPY pyproject.toml setup.py setup_uv_env.sh README.md deepy.py ./
# hadolint ignore=SC2086
RUN PYTHON_VERSION=/usr/bin/python3 bash setup_uv_env.sh --runtime ${TORCH} ${FEATURES} && rm -rf /root/.cache
COPY . .

CMD ["python", "deepy.py", "--help"]
