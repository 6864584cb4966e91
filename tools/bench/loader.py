"""How fast a user's loader is, with how many workers, and where a batch's time goes."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch

from phalanx.tools.bench.measuring import quantile
from phalanx.tools.bench.report import SCHEMA
from phalanx.tools.usage import CannotFinish, UsageMistake, nearest

WORTH_IT = 1.05  # more workers must be so many times as fast to be the advice


def load_function(target: str) -> Callable[..., Any]:
    """The function of ``script.py:function``; the script runs as a module, not as ``__main__``.

    Raises:
        UsageMistake: There is no such file or function.
        CannotFinish: The script raises.
    """
    name, colon, function = target.rpartition(":")
    path = Path(name)
    if not colon or not function.isidentifier() or not name:
        raise UsageMistake(
            f"{target!r}: a loader is named by its script and a function that returns it.",
            fix="phalanx bench loader train.py:make_loader",
        )
    if not path.is_file():
        raise UsageMistake(
            f"{target!r}: there is no file {name}.", fix="phalanx bench loader train.py:make_loader"
        )
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageMistake(
            f"{target!r}: {name} is no Python file.", fix="phalanx bench loader train.py:make_loader"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # workers unpickle its classes by this name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CannotFinish(f"{name} raised {type(error).__name__}: {error}", fix="python " + name) from error
    found = getattr(module, function, None)
    if not callable(found):
        near = nearest(
            function, [key for key, value in vars(module).items() if inspect.isfunction(value)], count=1
        )
        raise UsageMistake(
            f"{target!r}: {name} has no function {function}.",
            fix=f"{name}:{near[0] if near else 'make_loader'}",
        )
    return found  # type: ignore[no-any-return]


def with_workers(make: Callable[..., Any], workers: int) -> Any:
    """A loader with so many workers: the function's own, or a copy of its DataLoader; None where neither can be."""
    parameters = inspect.signature(make).parameters.values()
    if any(one.name == "num_workers" or one.kind is one.VAR_KEYWORD for one in parameters):
        return make(num_workers=workers)
    loader = make()
    return _copied(loader, workers) if type(loader) is DataLoader else None


def _copied(loader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    options: dict[str, Any] = {
        "num_workers": workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    if workers:
        options |= {
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": True,  # their start is told apart, as the first batch
        }
    if loader.batch_sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
            options["sampler"] = loader.sampler
    else:
        options["batch_sampler"] = loader.batch_sampler
    return DataLoader(loader.dataset, **options)


def samples_in(batch: Any) -> int | None:
    """Samples of a batch: the length of the first tensor in it, None where there is none."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for part in batch:
            count = samples_in(part)
            if count is not None:
                return count
    return None


@dataclass
class Clock:
    """Seconds spent in the parts of a batch, where a loader works in this process."""

    items_s: float = 0.0
    collate_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)


def run_loader(loader: Any, batches: int, warmup: int, workers: int | None) -> tuple[dict[str, Any], Clock]:
    """Take batches from a loader as fast as it gives them, over as many epochs as that takes.

    Raises:
        CannotFinish: It gives no batch.
    """
    clock = Clock()
    with _watched(clock):
        begun = time.perf_counter()
        source = _endless(loader)
        next(source)
        first_s = time.perf_counter() - begun
        for _ in range(warmup):
            next(source)
        clock.items_s = clock.collate_s = 0.0
        counts: list[int | None] = []
        begun = time.perf_counter()
        for _ in range(batches):
            asked = time.perf_counter()
            counts.append(samples_in(next(source)))
            clock.waits_s.append(time.perf_counter() - asked)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total_s = time.perf_counter() - begun
        source.close()
    known = [count for count in counts if count is not None]
    waits = sorted(clock.waits_s)
    return {
        "workers": workers,
        "batches": batches,
        "samples_per_s": sum(known) / total_s if len(known) == batches else None,
        "batches_per_s": batches / total_s,
        "first_batch_s": first_s,
        "median_ms": quantile(waits, 0.5) * 1e3,
        "p99_ms": quantile(waits, 0.99) * 1e3,
    }, clock


def _endless(loader: Any) -> Generator[Any, None, None]:
    while True:
        some = False
        for batch in loader:
            some = True
            yield batch
        if not some:
            raise CannotFinish("the loader gave no batch.", fix="check its dataset's length and batch size")


@contextmanager
def _watched(clock: Clock) -> Iterator[None]:
    """Time what torch's DataLoader does in this process: fetching items, and putting them together."""
    kinds: tuple[Any, ...] = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    originals = [kind.fetch for kind in kinds]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(fetcher: Any, index: Any) -> Any:
            collate = fetcher.collate_fn
            spent = 0.0

            def timed_collate(data: Any) -> Any:
                nonlocal spent
                begun = time.perf_counter()
                made = collate(data)
                spent += time.perf_counter() - begun
                return made

            fetcher.collate_fn = timed_collate
            begun = time.perf_counter()
            try:
                return original(fetcher, index)
            finally:
                fetcher.collate_fn = collate
                clock.items_s += time.perf_counter() - begun - spent
                clock.collate_s += spent

        return wrapper

    for kind, original in zip(kinds, originals, strict=True):
        kind.fetch = timed(original)
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.fetch = original


def measure_loader(target: str, workers: Sequence[int], batches: int, warmup: int) -> dict[str, Any]:
    """The report on a user's loader.

    Raises:
        UsageMistake: There is no such function.
        CannotFinish: It raises, or gives nothing to iterate over.
    """
    make = load_function(target)
    results: list[dict[str, Any]] = []
    where: dict[str, float] = {}
    kind = ""
    for count in workers:
        loader = _made(lambda count=count: with_workers(make, count), target)  # type: ignore[misc]
        is_fixed = loader is None
        loader = _made(make, target) if is_fixed else loader
        kind = type(loader).__name__
        result, clock = _made(
            lambda loader=loader, shown=None if is_fixed else count: run_loader(
                loader, batches, warmup, shown
            ),  # type: ignore[misc]
            target,
        )
        results.append(result)
        if count == 0 or is_fixed:
            where = _shares(clock)
        if is_fixed:
            break
    return {
        "schema": SCHEMA,
        "benchmark": "loader",
        "target": target,
        "loader": kind,
        "device": f"{len(os.sched_getaffinity(0))} cores",
        "torch_version": str(torch.__version__),
        "results": results,
        "where": where,
        "advice": _advice(results),
        "correct": True,
    }


def _made(function: Callable[[], Any], target: str) -> Any:
    try:
        return function()
    except (UsageMistake, CannotFinish):
        raise
    except Exception as error:
        words = " ".join(str(error).split())[-300:]
        raise CannotFinish(
            f"{target}: {type(error).__name__}: {words}", fix="make it work in a loop of your own first"
        ) from error


def _shares(clock: Clock) -> dict[str, float]:
    """Parts of a batch's time; nothing where the loader is none of torch's."""
    total = sum(clock.waits_s)
    if not clock.items_s or not total:
        return {}
    rest = max(0.0, total - clock.items_s - clock.collate_s)
    return {
        "dataset": clock.items_s / total,
        "collate": clock.collate_s / total,
        "order_and_transfer": rest / total,
    }


def _advice(results: Sequence[dict[str, Any]]) -> str:
    known = [result for result in results if result["workers"] is not None]
    if len(known) < 2:
        return ""
    fastest = max(known, key=lambda result: float(result["batches_per_s"]))
    enough = min(
        (one for one in known if one["batches_per_s"] * WORTH_IT >= fastest["batches_per_s"]),
        key=lambda result: int(result["workers"]),
    )
    return f"num_workers={enough['workers']} ({enough['batches_per_s']:.2f} batches/s)"
