"""Keys are mended into a new file that torch loads strictly, and nothing is guessed or lost."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.dist.key_rewrites import StateDictError
from phalanx.tools.ckpt import BadCheckpoint, open_checkpoint
from phalanx.tools.ckpt.fixing import default_output, fix
from phalanx.tools.ckpt.like import Like, read_like
from phalanx.tools.usage import UsageMistake
from tests.tools.ckpt.samples import Tied, trained, tutorial

KEYS = ["encoder.0.weight", "encoder.0.bias", "head.weight"]


def state(keys: list[str]) -> dict[str, torch.Tensor]:
    return {key: torch.full((number + 2,), float(number)) for number, key in enumerate(keys)}


def mended(tmp_path: Path, source: Any, like: Any, **options: Any) -> Any:
    """Save, fix, and load with torch."""
    torch.save(source, tmp_path / "in.pt")
    if not isinstance(like, str):
        torch.save(like, tmp_path / "like.pt")
        like = str(tmp_path / "like.pt")
    out = tmp_path / "out.pt"
    fix(open_checkpoint(tmp_path / "in.pt"), read_like(like), out, force=True, **options)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (["_orig_mod.stem.conv1.c.weight", "_orig_mod.head.l.weight"], ["stem.conv1.c.weight", "head.l.weight"]),
        (["model.layer.weight", "model.layer.bias"], ["model._orig_mod.layer.weight", "model._orig_mod.layer.bias"]),
        (["model._orig_mod.encoder.layer.weight", "model.head.weight"], ["model.encoder.layer.weight", "model.head.weight"]),
        (["_orig_mod.output_projection.weight", "module.layer1.weight"], ["output_projection.weight", "layer1.weight"]),
        (["module_list.0.weight"], ["module_list.0.weight"]),
        (["module.module.conv.weight"], ["module.conv.weight"]),
        (["module.module.conv.weight"], ["conv.weight"]),
        (["_forward_module.model.encoder.weight"], ["model.encoder.weight"]),
        (["model.encoder.fc1.weight", "model.shared.weight"], ["encoder.fc1.weight", "shared.weight"]),
        (["model.model.backbone.stem.weight"], ["backbone.stem.weight"]),
        (["encoder.conv1.weight", "decoder.0.weight"], ["model.encoder.conv1.weight", "model.decoder.0.weight"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("legacy", [False, True])
def test_wrappers_and_prefixes(tmp_path: Path, source: list[str], wanted: list[str], legacy: bool) -> None:
    content, like = state(source), state(wanted)
    torch.save(content, tmp_path / "in.pt", _use_new_zipfile_serialization=not legacy)
    torch.save(like, tmp_path / "like.pt")
    fix(open_checkpoint(tmp_path / "in.pt"), read_like(str(tmp_path / "like.pt")), tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert list(loaded) == wanted
    assert all(torch.equal(loaded[new], content[old]) for old, new in zip(source, wanted, strict=True))
    assert list(torch.load(tmp_path / "in.pt")) == source


def test_the_source_stays_as_it_is_and_an_output_is_never_replaced(tmp_path: Path) -> None:
    torch.save(state(["module.a", "module.b"]), tmp_path / "in.pt")
    before = (tmp_path / "in.pt").read_bytes()
    contents = open_checkpoint(tmp_path / "in.pt")
    with pytest.raises(UsageMistake, match="exists already"):
        fix(contents, Like({"a": None, "b": None}), tmp_path / "in.pt")
    assert (tmp_path / "in.pt").read_bytes() == before
    fix(contents, Like({"a": None, "b": None}), tmp_path / "in.pt", force=True)
    assert list(torch.load(tmp_path / "in.pt")) == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
    assert default_output(Path("a/model.pt")) == Path("a/model.fixed.pt")


def test_a_model_loads_it_strictly_with_its_versions(tmp_path: Path) -> None:
    model, optimizer = trained()
    wrapped = torch.nn.DataParallel(torch.compile(model))
    source = {**tutorial(wrapped, optimizer), "model": wrapped.state_dict()}
    loaded = mended(tmp_path, source, Tied().state_dict())
    Tied().load_state_dict(loaded, strict=True)
    assert loaded._metadata["norm"] == {"version": 2}
    assert loaded["head.weight"].data_ptr() == loaded["table.weight"].data_ptr()


def test_the_rest_is_kept_on_request_and_where_like_has_it(tmp_path: Path) -> None:
    model, optimizer = trained()
    wrapped = torch.nn.DataParallel(model)
    source = {**tutorial(wrapped, optimizer), "model": wrapped.state_dict(), "rng": torch.get_rng_state()}
    for like, options in ((model.state_dict(), {"keep_other": True}), (tutorial(model, optimizer), {})):
        loaded = mended(tmp_path, source, like, **options)
        Tied().load_state_dict(loaded["model"], strict=True)
        optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["epoch"] == 3
        assert torch.equal(loaded["rng"], source["rng"])


def test_tied_names_are_both_there(tmp_path: Path) -> None:
    """safetensors files and consolidated shards hold a tied tensor once."""
    tied, once = Tied().state_dict(), Tied().state_dict()
    del once["head.weight"]
    loaded = mended(tmp_path, once, tied)
    Tied().load_state_dict(loaded, strict=True)
    fix(open_checkpoint(tmp_path / "in.pt"), read_like(str(tmp_path / "like.pt")), tmp_path / "a.safetensors")
    from safetensors.torch import load_file

    Tied().load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)


def test_a_second_name_that_is_not_wanted_is_dropped(tmp_path: Path) -> None:
    tied, once = Tied().state_dict(), Tied().state_dict()
    del once["head.weight"]
    assert list(mended(tmp_path, tied, once)) == list(once)


def test_a_moving_average_is_left_out(tmp_path: Path) -> None:
    source = state(["encoder.weight", "ema_module.n_averaged", "ema_module.module.encoder.weight"])
    source["ema_module.module.encoder.weight"] = torch.ones(2)
    loaded = mended(tmp_path, source, state(["encoder.weight"]))
    assert torch.equal(loaded["encoder.weight"], source["encoder.weight"])
    torch.save({"module.a": torch.zeros(2), "a": torch.ones(2)}, tmp_path / "in.pt")
    with pytest.raises(StateDictError, match=r"'a' and 'module.a'"):
        fix(open_checkpoint(tmp_path / "in.pt"), Like({"a": (2,)}), tmp_path / "b.pt")


def test_rules(tmp_path: Path) -> None:
    source = state(["features.layer.norm.1.weight", "features.layer.conv.2.weight"])
    wanted = ["features.layer.norm1.weight", "features.layer.conv2.weight"]
    rules = [(r"\.(norm|conv)\.(\d)\.", r".\1\2.")]
    assert list(mended(tmp_path, source, state(wanted), rules=rules)) == wanted


@pytest.mark.parametrize(
    ("source", "wanted", "message"),
    [
        ({"net.conv.weight": [2]}, {"backbone.other": [2]}, "none of its 1 keys"),
        ({"a.weight": [2]}, {"a.weight": [2], "b.weight": [2]}, "1 missing: 'b.weight'"),
        ({"a.weight": [2], "b.weight": [2]}, {"a.weight": [2]}, "1 unexpected: 'b.weight'"),
        ({"module.fc.weight": [702, 3]}, {"fc.weight": [625, 3]}, r"\[702, 3\] -> \[625, 3\]"),
        ({"s._fsdp_wrapped_module._flat_param": [9]}, {"s.weight": [3, 3]}, "flattened FSDP shards"),
    ],
)
def test_what_does_not_fit_is_told_and_nothing_is_written(
    tmp_path: Path, source: dict[str, list[int]], wanted: dict[str, list[int]], message: str
) -> None:
    content = {key: torch.zeros(shape) for key, shape in source.items()}
    torch.save(content, tmp_path / "in.pt")
    like = Like({key: tuple(shape) for key, shape in wanted.items()})
    with pytest.raises((BadCheckpoint, StateDictError), match=message):
        fix(open_checkpoint(tmp_path / "in.pt"), like, tmp_path / "out.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_partial_writes_what_fits(tmp_path: Path) -> None:
    source = {"module.a": torch.ones(2), "module.b": torch.ones(3), "module.c": torch.ones(4)}
    like = {"a": torch.zeros(2), "b": torch.zeros(9), "d": torch.zeros(1)}
    assert list(mended(tmp_path, source, like, partial=True)) == ["a"]


def test_lists_of_keys(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("# the model\n" + "\n".join(KEYS) + "\n")
    (tmp_path / "keys.json").write_text(
        '{"encoder.0.weight": [2], "encoder.0.bias": [3], "head.weight": null}'
    )
    source = state([f"module.{key}" for key in KEYS])
    for like in (str(tmp_path / "keys.txt"), str(tmp_path / "keys.json"), ", ".join(KEYS)):
        assert list(mended(tmp_path, source, like)) == KEYS
    with pytest.raises(UsageMistake, match="no such file"):
        read_like(str(tmp_path / "none.pt"))


_KEY = st.lists(st.sampled_from(["a", "module", "_orig_mod", "b", "0"]), min_size=1, max_size=4).map(".".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(_KEY, min_size=1, max_size=5, unique=True),
    wrapper=st.sampled_from(["module.", "_orig_mod.", "net."]),
)
def test_a_wrapper_put_round_any_keys_comes_off(tmp_path: Path, keys: list[str], wrapper: str) -> None:
    source, like = state([wrapper + key for key in keys]), state(keys)
    try:
        loaded = mended(tmp_path, source, like)
    except (StateDictError, BadCheckpoint):
        return  # two answers fit: refusing is right
    assert {key: value.tolist() for key, value in loaded.items()} == {
        key: value.tolist() for key, value in like.items()
    }


_LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=60), st.binary(max_size=20),
    st.just(torch.float16), st.just(torch.Size([2, 3])), st.builds(lambda n: torch.arange(float(n)), st.integers(0, 4)),
)  # fmt: skip
_VALUE = st.recursive(
    _LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(), st.booleans()), inner, max_size=4),
    ),
    max_leaves=15,
)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return type(value)(_plain(entry) for entry in value) if type(value) in (list, tuple) else value


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rest=_VALUE, legacy=st.booleans())
def test_whatever_stands_beside_the_weights_comes_back_the_same(
    tmp_path: Path, rest: Any, legacy: bool
) -> None:
    source = {"state_dict": {"module.w": torch.ones(2)}, "rest": rest, "again": rest}
    torch.save(source, tmp_path / "in.pt", _use_new_zipfile_serialization=not legacy)
    fix(
        open_checkpoint(tmp_path / "in.pt"),
        Like({"w": (2,)}),
        tmp_path / "out.pt",
        keep_other=True,
        force=True,
    )
    loaded = torch.load(
        tmp_path / "out.pt", weights_only=False
    )  # which refuses empty bytes, as Python pickles them
    assert list(loaded["state_dict"]) == ["w"]
    assert _plain(loaded["rest"]) == _plain(rest) == _plain(loaded["again"])


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """200 MB of weights in a process that may have 150 MB more than it starts with."""
    torch.save({f"module.{n}.weight": torch.zeros(1 << 20) for n in range(50)}, tmp_path / "in.pt")
    program = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from phalanx.tools.ckpt.fixing import fix\nfrom phalanx.tools.ckpt.like import Like\n"
        "from phalanx.tools.ckpt import open_checkpoint\nfrom phalanx.tools.ckpt.converting import convert\n"
        "limit = int(open('/proc/self/statm').read().split()[0]) * 4096 + (150 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "folder = Path(sys.argv[1])\n"
        "fix(open_checkpoint(folder / 'in.pt'), Like({f'{n}.weight': None for n in range(50)}), folder / 'out.pt')\n"
        "convert(open_checkpoint(folder / 'out.pt'), folder / 'step-1', 'phalanx')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert len(torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)) == 50
    assert resource.getpagesize() == 4096
