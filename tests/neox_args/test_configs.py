"""Every shipped YAML loads and derives; models have their published sizes; GPT-NeoX users' configs work."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_trainable, derive
from megatron.neox_arguments.formulas import flops_per_token, neox_flops_per_token, parameter_count
from megatron.plan.partners import ConfigFiles
from tests.neox_args.helpers import load_text

pytestmark = pytest.mark.cpu

CONFIGS = Path(__file__).parents[2] / "configs"
MIXTURES = sorted(path.stem for path in CONFIGS.glob("mixtures/*.yml"))
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yml") if path.parent.name != "mixtures")
SHIPPED += sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.json"))
FILES = ConfigFiles(CONFIGS)


def whole(name: str) -> list[str]:
    """The file, with those it needs where it holds only paths, or a network without its training."""
    if name.endswith(".json"):
        return [name, "local_setup.yml" if "125M" in name or "tune" in name else "pythia/14M.yml"]
    paths = [str(path) for path in FILES.whole(CONFIGS / name)[0]]
    return [*paths, "local_setup.yml"] if len(paths) == 1 and "save:" not in Path(paths[0]).read_text() else paths


def _model(name: str, vocab: int = 50304) -> NeoXArgs:
    return derive(NeoXArgs.from_files([name], conf_dir=str(CONFIGS)), Facts(vocab_size=vocab))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_load_and_derive_without_complaint(name: str) -> None:
    args = NeoXArgs.from_files(whole(name), conf_dir=str(CONFIGS))
    facts = Facts(vocab_size=50277)
    for given in (args, type(args).from_saved(args.to_dict())):
        done = derive(derive(given), facts)
        assert done.notes == ()
        assert done.training.train_batch_size > 0


@pytest.mark.parametrize("name", SHIPPED)
def test_a_resolved_config_is_a_config(name: str, tmp_path: Path) -> None:
    """What derivation wrote, as a run's resolved.yml holds it, is accepted by every rule and means the same."""
    args = NeoXArgs.from_files(whole(name), conf_dir=str(CONFIGS))
    facts = Facts(vocab_size=50277)
    args = derive(args, facts)
    (tmp_path / "resolved.yml").write_text(yaml.safe_dump(args.to_dict()), encoding="utf-8")
    again = derive(NeoXArgs.from_files([str(tmp_path / "resolved.yml")]), facts)
    assert again == args and again.hash() == args.hash() and again.notes == ()


@pytest.mark.parametrize("name", MIXTURES)
def test_shipped_mixtures_are_used_in_three_ways(name: str, tmp_path: Path) -> None:
    """Merged as a file, named by a key, extended: always the same, without complaint."""
    more = {"overrides": ["eval_iters=0"], "conf_dir": str(CONFIGS)}
    (tmp_path / "run.yml").write_text(f"extends: [{CONFIGS}/pythia/14M.yml, {CONFIGS}/mixtures/{name}.yml]")
    given = [
        derive(NeoXArgs.from_files(["pythia/14M.yml", f"mixtures/{name}.yml"], **more)),
        derive(NeoXArgs.from_files(["pythia/14M.yml"], **{**more, "overrides": [f"mixture={name}", "eval_iters=0"]})),
        derive(NeoXArgs.from_files([str(tmp_path / "run.yml")], ["eval_iters=0"])),
    ]
    given.append(derive(type(given[0]).from_dict(given[0].to_dict())))
    for args in given:
        assert args.data == given[0].data and args.notes == ()
        assert len(args.data.train_data_paths) == len(args.data.train_data_names) > 1
        assert args.training.do_train


@pytest.mark.parametrize("name", [name for name in SHIPPED if "/" in name or name[0].isdigit()])
def test_every_model_can_be_merged_with_local_setup(name: str) -> None:
    args = derive(NeoXArgs.from_files(whole(name), conf_dir=str(CONFIGS)))
    check_trainable(args)
    assert args.checkpoint.save and args.training.do_train and args.training.do_valid


@pytest.mark.parametrize(
    ("name", "vocab", "parameters"),
    [
        # Biderman et al. 2023, table 1 (50304 rows)
        ("pythia/70M", 50304, 70_426_624),
        ("pythia/160M", 50304, 162_322_944),
        ("pythia/410M", 50304, 405_334_016),
        ("pythia/1B", 50304, 1_011_781_632),
        ("pythia/1.4B", 50304, 1_414_647_808),
        ("pythia/2.8B", 50304, 2_775_208_960),
        ("pythia/6.9B", 50432, 6_857_302_016),
        ("pythia/12B", 50688, 11_846_072_320),
        # Black et al. 2022 (50432 rows)
        ("20B", 50432, 20_554_567_680),
        # Touvron et al. 2023 and Dubey et al. 2024, as released
        ("llama/llama2-7B", 32000, 6_738_415_616),
        ("llama/llama2-13B", 32000, 13_015_864_320),
        ("llama/llama2-70B", 32000, 68_976_648_192),
        ("llama/llama3-8B", 128256, 8_030_261_248),
        ("llama/llama3-70B", 128256, 70_553_706_496),
        # as released on the Hub, by transformers' own classes
        ("gpt2/small", 50257, 124_439_808),
        ("gpt2/medium", 50257, 354_823_168),
        ("gpt2/large", 50257, 774_030_080),
        ("gpt2/xl", 50257, 1_557_611_200),
        ("qwen2.5/0.5B", 151936, 494_032_768),
        ("qwen2.5/1.5B", 151936, 1_543_714_304),
        ("qwen2.5/3B", 151936, 3_085_938_688),
        ("qwen2.5/7B", 152064, 7_615_616_512),
        ("qwen3/0.6B", 151936, 596_049_920),
        ("qwen3/1.7B", 151936, 1_720_574_976),
        ("qwen3/4B", 151936, 4_022_468_096),
        ("qwen3/8B", 151936, 8_190_735_360),
        ("qwen3/14B", 151936, 14_768_307_200),
        ("qwen3/32B", 151936, 32_762_123_264),
        ("olmo2/1B", 100352, 1_484_916_736),
        ("olmo2/7B", 100352, 7_298_617_344),
        ("olmo2/13B", 100352, 13_716_198_400),
        ("olmo2/32B", 100352, 32_234_279_936),
        ("olmo3/7B", 100352, 7_298_617_344),
        ("olmo3/32B", 100352, 32_234_279_936),
        ("falcon/7B", 65024, 6_921_720_704),
        ("falcon/40B", 65024, 41_303_293_952),
        ("phi3/mini-4k", 32064, 3_821_079_552),
        ("phi3/medium-4k", 32064, 13_960_238_080),
        ("gemma/2B", 256000, 2_506_172_416),
        ("gemma/7B", 256000, 8_537_680_896),
        ("gemma2/2B", 256000, 2_614_341_888),
        ("gemma2/9B", 256000, 9_241_705_984),
        ("gemma2/27B", 256000, 27_227_128_320),
        ("gemma3/270M", 262144, 268_098_176),
        ("gemma3/1B", 262144, 999_885_952),
        ("phi/phi-1", 51200, 1_418_270_720),
        ("phi/phi-1.5", 51200, 1_418_270_720),
        ("phi/phi-2", 51200, 2_779_683_840),
    ],
)
def test_published_parameter_counts(name: str, vocab: int, parameters: int) -> None:
    assert parameter_count(_model(name).model, vocab).total == parameters


def gpt(layers: int, hidden: int, vocab: int, mlp: int = 0, norms: int = 2) -> int:
    """Parameters of a GPT with biases, an untied head and no learned positions; `mlp`: of one layer's feed-forward."""
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = mlp or 8 * hidden * hidden + 5 * hidden
    return layers * (attention + mlp + norms * 2 * hidden) + 2 * vocab * hidden + 2 * hidden


def llama(layers: int, hidden: int, width: int, vocab: int, kv: float = 1.0) -> int:
    """Parameters of a Llama; `kv`: key heads per query head."""
    attention = int((2 + 2 * kv) * hidden * hidden)
    return layers * (attention + 3 * hidden * width + 2 * hidden) + 2 * vocab * hidden + hidden


@pytest.mark.parametrize(
    ("name", "vocab", "parameters"),
    [
        ("1-3B-transformer-engine", 50304, gpt(24, 2048, 50304)),
        ("125M-dmoe", 50304, gpt(12, 768, 50304, mlp=768 * 8 + 8 * 2 * 768 * 3072)),
        *((f"{name}_125M", 50304, gpt(12, 768, 50304)) for name in ("bf16", "bnb", "slurm")),
        ("125M-json", 50304, gpt(12, 768, 50304)),
        ("800M", 50304, gpt(16, 2048, 50304)),
        ("autotuning_configs/small_tune.json", 50304, gpt(12, 768, 50304)),
        ("autotuning_configs/tune.json", 50304, gpt(12, 768, 50304)),
        ("autotuning_configs/tune_1-3B.json", 50304, gpt(24, 2048, 50304)),
        ("autotuning_configs/tune_6-7B.json", 50304, gpt(32, 4096, 50304)),
        ("finetuning_configs/6-9B", 50432, 6_857_302_016),
        # projections to twice 3072 and back (GPT-NeoX also keeps biases that it never adds), a matrix over positions
        ("gmlp_small", 50304, 12 * (3 * 768 * 3072 + 2048 * 2049 + 2 * 768 + 2 * 3072) + 2 * 50304 * 768 + 2 * 768),
        ("llama/7B", 32000, 6_738_415_616),
        ("llama/13B", 32000, 13_015_864_320),
        ("llama/30B", 32000, 32_528_943_616),
        ("llama/65B", 32000, 65_285_660_672),
        ("llama2/7B", 32000, 6_738_415_616),
        ("llama2/13B", 32000, 13_015_864_320),
        ("llama2/70B", 32000, 68_976_648_192),
        ("llama2/codellama_7B", 32016, 6_738_546_688),
        ("llama2/codellama_34B", 32000, llama(48, 8192, 22016, 32000, kv=1 / 8)),
        ("llemma/7B", 32016, 6_738_546_688),
        ("llemma/34B", 32000, llama(48, 8192, 22016, 32000, kv=1 / 8)),
        ("pythia/1-4B", 50304, 1_414_647_808),
        ("pythia/2-8B", 50304, 2_775_208_960),
        ("pythia/6-9B", 50432, 6_857_302_016),
    ],
)
def test_the_names_of_gpt_neox_have_its_sizes(name: str, vocab: int, parameters: int) -> None:
    """The file of each name has as many parameters as the published model, or as GPT-NeoX's file builds."""
    file = name if name.endswith(".json") else f"{name}.yml"
    args = derive(NeoXArgs.from_files(whole(file), conf_dir=str(CONFIGS)), Facts(vocab_size=vocab))
    assert parameter_count(args.model, vocab).total == parameters


NAMES = """
1-3B-transformer-engine.yml 125M-dmoe.yml 125M-json.yml 800M.yml autotuning_configs/small_tune.json
autotuning_configs/tune.json autotuning_configs/tune_1-3B.json autotuning_configs/tune_6-7B.json bf16_125M.yml
bnb_125M.yml cpu_mock_config.yml docker/pythia-paths.yml eleutherai_cluster.yml finetuning_configs/6-9B.yml gen_docs.py
gmlp_small.yml llama/13B.yml llama/30B.yml llama/65B.yml llama/7B.yml llama/README.md llama/train_config.yml
llama2/13B.yml llama2/70B.yml llama2/7B.yml llama2/codellama_34B.yml llama2/codellama_7B.yml llemma/34B.yml
llemma/7B.yml local_setup_comet.yml local_setup_wandb.yml mamba/mamba-1.4B.yml mamba/mamba-130M.yml
mamba/mamba-2.8B.yml mamba/mamba-370M.yml mamba/mamba-790M.yml neox_arguments.md prof.yml pythia/1-4B.yml
pythia/2-8B.yml pythia/6-9B.yml rwkv/170M.yml slurm_125M.yml slurm_local.json sparse.yml
1-3B.yml 125M.yml 13B.yml 175B.yml 19M.yml 2-7B.yml 20B.yml 350M.yml 49M.yml 6-7B.yml 760M.yml README.md
local_setup.yml mistral/7B.yml pythia/12B.yml pythia/14M.yml pythia/160M.yml pythia/1B.yml pythia/31M.yml
pythia/410M.yml pythia/70M.yml slurm_local.yml text_generation.yml
"""


def test_every_name_of_gpt_neox_is_there() -> None:
    """A command of its documents that names a config finds one."""
    assert [name for name in NAMES.split() if not (CONFIGS / name).is_file()] == []


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "lr"),
    [
        ("pythia/14M", 6, 128, 4, 1e-3),
        ("pythia/31M", 6, 256, 8, 1e-3),
        ("19M", 6, 512, 8, 1e-3),
        ("49M", 10, 640, 10, 8e-4),
        ("125M", 12, 768, 12, 6e-4),
        ("350M", 24, 1024, 16, 3e-4),
        ("760M", 24, 1536, 16, 2.5e-4),
        ("1-3B", 24, 2048, 16, 2e-4),
        ("2-7B", 32, 2560, 32, 1.6e-4),
        ("6-7B", 32, 4096, 32, 1.2e-4),
        ("13B", 40, 5120, 40, 1e-4),
        ("175B", 96, 12288, 96, 6e-5),
    ],
)
def test_published_shapes(name: str, layers: int, hidden: int, heads: int, lr: float) -> None:
    args = _model(name)
    assert (args.model.num_layers, args.model.hidden_size, args.model.num_attention_heads) == (layers, hidden, heads)
    assert args.optimizer.lr == pytest.approx(lr, rel=1e-12)
    assert args.schedule.min_lr == pytest.approx(lr / 10, rel=1e-12)


def test_pythia_computes_the_same_on_any_number_of_ranks() -> None:
    for ranks, accumulation in ((1, 32), (8, 4), (32, 1)):
        args = derive(NeoXArgs.from_files(["pythia/70M"], conf_dir=str(CONFIGS)), Facts(num_devices=ranks))
        assert args.training.train_batch_size == 1024
        assert args.training.gradient_accumulation_steps == accumulation


def test_20b_on_its_96_ranks() -> None:
    args = derive(NeoXArgs.from_files(["20B"], conf_dir=str(CONFIGS)), Facts(num_devices=96))
    assert args.parallel.data_parallel_size == 12 and args.training.gradient_accumulation_steps == 32


def test_flops() -> None:
    """Llama-3 8B at 8192: 57.9 GFLOP per token with full attention, as NeMo counted (711 TFLOP/s, 12 273 tokens/s)."""
    model = _model("llama/llama3-8B").model
    assert flops_per_token(model, 128256) == pytest.approx(711e12 / 12273, rel=5e-3)
    # 53 samples of 2048 tokens a second on 16 devices gave 290 TFLOP/s by GPT-NeoX's formula for a 7B, 32-layer model
    seven = _model("6-7B").model
    assert 53 * 2048 / 16 * neox_flops_per_token(seven, 50688, recompute=False) == pytest.approx(290e12, rel=0.02)
    assert neox_flops_per_token(seven, 50688) / neox_flops_per_token(seven, 50688, recompute=False) == pytest.approx(
        4 / 3
    )


AS_NEOX_USERS_WRITE_IT = """
# a comment outside
{
   "pipe-parallel-size": 1,
   "model-parallel-size": 2, # and one inside
   "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4,
   "seq-length": 32, "max-position-embeddings": 32,
   "norm": "layernorm", "pos-emb": "rotary", "rotary_pct": 0.25, "no-weight-tying": true,
   "gpt_j_residual": true, "output_layer_parallelism": "column",
   "attention-config": [[["flash"], 4]],
   "scaled-upper-triang-masked-softmax-fusion": true, "bias-gelu-fusion": true, "use_bias_in_norms": false,
   "init_method": "small_init", "output_layer_init_method": "wang_init",
   "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], "eps": 1.0e-8,}},
   "min_lr": 0.97e-5,
   "zero_optimization": {"stage": 1, "allgather_partitions": True, "allgather_bucket_size": 500000000,
     "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 500000000,
     "contiguous_gradients": True, "cpu_offload": False},
   "train_micro_batch_size_per_gpu": 4, "gas": 1, "data-impl": "mmap", "num_workers": 1, "split": "995,4,1",
   "checkpoint-activations": true, "checkpoint-num-layers": 1, "partition-activations": true,
   "synchronize-each-layer": true,
   "gradient_clipping": 1.0, "weight-decay": 0.01, "hidden-dropout": 0, "attention-dropout": 0,
   "fp16": {"fp16": true, "enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 12,
     "hysteresis": 2, "min_loss_scale": 1},
   "train-iters": 150000, "lr-decay-iters": 150000, "distributed-backend": "nccl", "lr-decay-style": "cosine",
   "warmup": 0.01, "save-interval": 500, "eval-interval": 1000, "eval-iters": 10,
   "log-interval": 2, "steps_per_print": 2, "wall_clock_breakdown": false, "keep-last-n-checkpoints": 4,
   "tokenizer-type": "HFTokenizer",
   "deepspeed_extra_args": {"comms_logger": {"enabled": true, "verbose": true, "prof_all": true, "debug": false},},
}
"""


def test_as_neox_users_write_it(tmp_path: Path) -> None:
    args = derive(
        load_text(
            tmp_path,
            AS_NEOX_USERS_WRITE_IT,
            '{"data-path": "d", "vocab-file": "v", "merge-file": "m", "save": "c", "load": "c", "log-dir": "logs"}',
        )
    )
    assert args.optimizer.precision == "fp16" and args.optimizer.lr == 0.97e-4
    assert args.checkpoint.checkpoint_factor == 500
    assert args.training.train_batch_size == 4
    assert args.model.attention_config == ("flash",) * 4
    said = "\n".join(args.notes)
    for name in (
        "scaled_upper_triang",
        "partition_activations",
        "synchronize_each_layer",
        "use_bias_in_norms",
        "fp16.fp16",
    ):
        assert said.count(name) == 1, name
    assert "zero_optimization.cpu_offload" not in said  # false asks for nothing
