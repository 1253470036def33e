"""One contender of quality.py: `python quality_contenders.py NAME FOLDER` trains on the folder's windows and scores.

Imports nothing of this library but in `deepy`: litgpt lives in an environment of its own.

Shapes: b windows of a step, s tokens, v vocabulary.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Logits = Callable[[Tensor], Tensor]  # tokens [b, s] -> [b, s, v]

ROOT = Path(__file__).resolve().parents[2]
WARM = 3  # steps until everything is compiled


def cpu_seconds() -> float:
    """Of this process, all its threads and the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Budget:
    """Iterates over steps until the seconds are used, which count from the step `WARM` on. `total` is how many steps
    there will be, as far as is known now: what a schedule wants to be told."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.total, self.start = seconds, 0, 10**6, 0.0

    def __iter__(self) -> Iterator[int]:
        while True:
            used = cpu_seconds()
            if self.steps == WARM:
                self.start = used
            if self.steps > WARM:
                each = (used - self.start) / (self.steps - WARM)
                left = round((self.start + self.seconds - used) / each)
                self.total = self.steps + left
                if left < 1:
                    return
            yield self.steps
            self.steps += 1


@dataclass
class Task:
    """What quality.py has written: its flags, and the arrays."""

    folder: Path
    flags: SimpleNamespace
    budget: Budget

    @classmethod
    def read(cls, folder: Path) -> Task:
        flags = SimpleNamespace(**json.loads((folder / "task.json").read_text()))
        return cls(folder, flags, Budget(flags.cpu_seconds))

    def array(self, name: str) -> np.ndarray:
        import numpy as np

        found: np.ndarray = np.load(self.folder / f"{name}.npy")
        return found

    def batches(self, rows: int) -> Iterator[Tensor]:
        """[rows, s + 1] int64 for each step of the budget, in the order of the file, again from the start behind its
        end."""
        import torch

        every = torch.from_numpy(self.array("train"))
        for step in self.budget:
            yield every[torch.arange(step * rows, (step + 1) * rows) % len(every)]


def score(task: Task, logits: Logits) -> float:
    """Bits per byte of the held-out windows: the nats of all targets that stand for text, over their bytes."""
    import torch
    import torch.nn.functional as F

    sizes, nats, read = torch.from_numpy(task.array("bytes")), 0.0, 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # nobody compiles for this
        for row in torch.from_numpy(task.array("held")).split(4):
            tokens, targets = row[:, :-1].contiguous(), row[:, 1:].reshape(-1)
            losses = F.cross_entropy(logits(tokens).float().flatten(0, 1), targets, reduction="none")
            nats += float((losses.double() * (sizes[targets] > 0)).sum())
            read += int(sizes[targets].sum())
    return nats / math.log(2) / read


def deepy(task: Task) -> tuple[int, int, Logits]:
    """This library: recipe, model, schedule, engine as train.py makes them."""
    import torch

    sys.path.insert(0, str(ROOT))
    from train_step import alone

    from megatron.data.batch import StepBatch
    from megatron.data.collate import CollateRules, allocate, complete
    from megatron.training.setup import build_engine, build_model, build_schedule

    flags = task.flags
    keys = {**recipe(flags, task.array("train").size), **flags.config}
    process = alone(keys, SimpleNamespace(vocab_size=flags.vocab))
    args, rows = process.args, process.args.training.train_batch_size
    micro = process.args.training.train_micro_batch_size_per_gpu
    engine = build_engine(process, build_model(process, flags.seed))
    columns = torch.arange(flags.tokens)
    arrays = allocate(CollateRules(flags.tokens), rows // micro, micro)
    for batch in task.batches(rows):
        parts = batch.view(rows // micro, micro, -1)
        arrays.tokens, arrays.targets = parts[..., :-1].contiguous().numpy(), parts[..., 1:].contiguous().numpy()
        arrays.positions = columns.expand(parts[..., 1:].shape).contiguous().numpy()
        complete(arrays)
        step = task.budget.steps
        rate = build_schedule(replace(args, schedule=replace(args.schedule, lr_decay_iters=task.budget.total)))(step)
        out = engine.train_batch(StepBatch.from_arrays(arrays, step=step, consumed=step * rows), rate)
        if step % 10 == 0:
            print(f"step {step} of {task.budget.total}: rate {rate:.2e}, {out}", flush=True)

    module = engine.module.eval()

    def logits(tokens: Tensor) -> Tensor:
        return module((tokens, columns.expand(tokens.shape)), then=lambda out: out.logits())

    return rows, sum(p.numel() for p in module.parameters()), logits


def recipe(flags: SimpleNamespace, data_tokens: int) -> dict[str, Any]:
    """What `deepy new` writes for a network of this depth and width, these data and this time."""
    from megatron.recipes.machine import look
    from megatron.recipes.run_file import sections
    from megatron.recipes.scaling import plan_training
    from megatron.recipes.shapes import build, read_recipe

    shape = build(read_recipe(flags.family, ROOT / "configs"), flags.hidden, flags.layers, flags.vocab)
    shape = replace(shape, keys={**shape.keys, "seq_length": flags.tokens, "max_position_embeddings": flags.tokens})
    machine = look(flags.hidden, flags.tokens)
    tokens = machine.flops * flags.cpu_seconds / flags.threads / shape.flops
    training = plan_training(shape.count.total, shape.outside_embeddings, flags.tokens, tokens, data_tokens)
    found = sections(shape, training, machine, valid_samples=0)
    engine = {"engine": "native", "precision": "fp32", "seed": flags.seed}
    return {key: value for section in found.values() for key, value in section.items()} | engine


def nanochat(task: Task) -> tuple[int, int, Logits]:
    """Its scripts/base_train.py as it stands, at the settings of its runs/runcpu.sh, with our windows for its loader's.

    What it imports for data, tokenizer, sampling and saving is replaced, so none of that must be installed.
    """
    flags, checkout = task.flags, Path(task.flags.nanochat)
    sys.path.insert(0, str(checkout))
    script: dict[str, Any] = {"__name__": "__main__"}
    saved: list[Any] = []

    def loader(*args: Any, **kwargs: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, int]]]:
        # It asks for one batch more than it trains on: the step that begins is known when the budget says so.
        for batch in task.batches(flags.batch):
            script["num_iterations"] = task.budget.total
            yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), dict.fromkeys(("epoch", "pq_idx", "rg_idx"), 0)
        script["num_iterations"] = task.budget.steps
        yield batch[:, :-1], batch[:, 1:], dict.fromkeys(("epoch", "pq_idx", "rg_idx"), 0)

    def save(folder: str, step: int, weights: Any, *rest: Any, **kwargs: Any) -> None:
        saved.append((step, script["orig_model"]))

    class Tokenizer:
        def get_vocab_size(self) -> int:
            return int(flags.vocab)

    stand_in("wandb")
    stand_in("nanochat.tokenizer", get_tokenizer=Tokenizer, get_token_bytes=lambda **kwargs: None)
    name = "tokenizing_distributed_data_loader_{}bos_bestfit"
    stand_in("nanochat.dataloader", **{name.format(kind): loader for kind in ("", "with_state_")})
    stand_in("nanochat.checkpoint_manager", save_checkpoint=save, load_checkpoint=None)
    stand_in("nanochat.engine", Engine=None)
    stand_in("scripts.base_eval", evaluate_core=None)
    sys.argv = ["base_train.py", f"--depth={flags.layers}", f"--aspect-ratio={flags.hidden // flags.layers}"]
    sys.argv += ["--head-dim=64", "--window-pattern=L", f"--max-seq-len={flags.tokens}"]
    sys.argv += [f"--device-batch-size={flags.batch}", f"--total-batch-size={flags.batch * flags.tokens}"]
    sys.argv += ["--num-iterations=1000000", "--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1"]
    os.environ |= {"NANOCHAT_DTYPE": "float32", "NANOCHAT_BASE_DIR": str(task.folder / "nanochat")}
    path = checkout / "scripts" / "base_train.py"
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), script)
    steps, model = saved[-1]
    assert steps == task.budget.steps, (steps, task.budget.steps)
    return flags.batch, sum(p.numel() for p in model.parameters()), model.eval()


def stand_in(name: str, **members: Any) -> None:
    """Put a module of this name where an import finds it."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def litgpt(task: Task) -> tuple[int, int, Logits]:
    """Its `pretrain` with a Llama of this size, AdamW and its cosine, whose peak and warm-up suit so short a run."""
    import torch
    from litgpt import pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule
    from torch.utils.data import DataLoader, IterableDataset

    flags = task.flags
    models: list[Any] = []

    class Over(Exception):
        pass

    class Windows(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            yield from task.batches(flags.batch)
            raise Over

    class Data(DataModule):
        def connect(self, *args: Any, **kwargs: Any) -> None:
            pass

        def train_dataloader(self) -> DataLoader:
            return DataLoader(Windows(), batch_size=None)

        def val_dataloader(self) -> DataLoader:
            return DataLoader([torch.zeros(flags.tokens + 1, dtype=torch.int64)])

    def fit(*args: Any, **kwargs: Any) -> None:
        models.append(kwargs["state"]["model"])
        kwargs["eval"].initial_validation = True  # instead of its two batches before that
        with suppress(Over):
            original(*args, **kwargs)

    def rate(peak: float, step: int, warmup: int, steps: int, least: float) -> float:
        return curve(peak, step, max(1, task.budget.total // 20), task.budget.total, least)

    original, curve = pretrain.fit, pretrain.get_lr
    pretrain.fit, pretrain.get_lr = fit, rate
    pretrain.validate = lambda *args, **kwargs: torch.zeros(())
    pretrain.save_checkpoint = lambda *args, **kwargs: None
    shape = {"n_layer": flags.layers, "n_embd": flags.hidden, "n_head": flags.hidden // 64, "block_size": flags.tokens}
    pretrain.setup(
        "pythia-14m",
        model_config=Config(
            **shape,
            vocab_size=flags.vocab,
            padded_vocab_size=flags.vocab,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=round(flags.hidden * 8 / 3 / 64) * 64,
        ),
        out_dir=task.folder / "litgpt",
        precision="32-true",
        data=Data(),
        train=TrainArgs(
            save_interval=None,
            global_batch_size=flags.batch,
            micro_batch_size=flags.batch,
            max_tokens=10**12,
            max_norm=1.0,
            min_lr=2e-4,
            lr_warmup_steps=1,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1),
        optimizer={
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        devices=1,
        logger_name="csv",
        seed=flags.seed,
    )
    model = models[0].eval()
    return flags.batch, sum(p.numel() for p in model.parameters()), model


CONTENDERS = {"deepy": deepy, "nanochat": nanochat, "litgpt": litgpt}


def main() -> None:
    name, task = sys.argv[1], Task.read(Path(sys.argv[2]))
    started = time.perf_counter()
    import torch

    torch.set_num_threads(task.flags.threads)
    rows, parameters, logits = CONTENDERS[name](task)
    found = {
        "cpu_seconds": cpu_seconds() - task.budget.start,
        "wall_seconds": time.perf_counter() - started,
        "start_seconds": task.budget.start,
        "steps": task.budget.steps,
        "tokens": task.budget.steps * rows * task.flags.tokens,
        "parameters": parameters,
    }
    found["bits_per_byte"] = score(task, logits)
    (task.folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
