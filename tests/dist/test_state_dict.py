"""Weights find their way into a model that is wrapped, compiled or named differently."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from phalanx.dist.state_dict import (
    AmbiguousKeysError,
    FlattenedShardsError,
    KeysDifferError,
    NothingMatchedError,
    canonical_keys,
    load_state_dict,
    match_state_dict,
    unwrap,
)
from tests.dist.state_dict_nets import Net, TiedNet, pairs, weights


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (
            ["_orig_mod.stem.conv1.c.weight", "_orig_mod.head.l.weight"],
            ["stem.conv1.c.weight", "head.l.weight"],
        ),
        (
            ["model.layer.weight", "model.layer.bias"],
            ["model._orig_mod.layer.weight", "model._orig_mod.layer.bias"],
        ),
        (
            ["model._orig_mod.encoder.layer.weight", "model.head.weight"],
            ["model.encoder.layer.weight", "model.head.weight"],
        ),
        (
            ["_orig_mod.output_projection.weight", "module.layer1.weight", "module.decoder.fc.weight"],
            ["output_projection.weight", "layer1.weight", "decoder.fc.weight"],
        ),
        (
            ["_forward_module.model.llm.lm_head.weight", "model.llm.embeddings.word_embeddings.weight"],
            ["model.llm.lm_head.weight", "model.llm.embeddings.word_embeddings.weight"],
        ),
        (["module_list.0.weight"], ["module_list.0.weight"]),
        (["module.module.conv.weight"], ["module.conv.weight"]),
        (["module.module.conv.weight"], ["conv.weight"]),
        (["module.module.conv.weight"], ["module.module.conv.weight"]),
        (["_forward_module.model.encoder.weight"], ["model.encoder.weight"]),
        (["module._orig_mod.net.module.fc.weight"], ["_orig_mod.net.fc.weight"]),
        (
            ["model.encoder.layers.0.fc1.weight", "model.shared.weight"],
            ["encoder.layers.0.fc1.weight", "shared.weight"],
        ),
        (["model.model.backbone.conv_stem.weight"], ["backbone.conv_stem.weight"]),
        (["model.model.backbone.conv_stem.weight"], ["model.backbone.conv_stem.weight"]),
        (
            ["encoder.conv1.weight", "decoder.blocks.0.weight"],
            ["model.encoder.conv1.weight", "model.decoder.blocks.0.weight"],
        ),
    ],
    ids=[
        "compiled checkpoint, eager model",
        "eager checkpoint, compiled sub-module",
        "component in the middle, one of two keys",
        "letters of the prefix are not a character set",
        "a key without the prefix is not cut",
        "underscore is not a dot",
        "a layer called module under a wrapper",
        "two wrappers",
        "a wrapped layer called module as it is",
        "strategy wrapper",
        "wrappers on both sides",
        "trainer's prefix removed",
        "prefix removed twice",
        "prefix removed no more than needed",
        "prefix added",
    ],
)
def test_every_key_finds_its_own_tensor(source: list[str], target: list[str]) -> None:
    assert pairs(weights(*source), target) == dict(zip(target, source, strict=True))


def test_rewrites_are_counted_and_named() -> None:
    match = match_state_dict(
        weights("model._orig_mod.encoder.layer.weight", "model.head.weight"),
        ["model.encoder.layer.weight", "model.head.weight"],
    )
    assert match.renamed == {"model._orig_mod.encoder.layer.weight": "model.encoder.layer.weight"}
    assert match.rewrites == ["'_orig_mod' removed from 1 of 2 keys"]
    match = match_state_dict(weights("model.a.weight", "model.b.weight"), ["a.weight", "b.weight"])
    assert match.rewrites == ["prefix 'model.' removed (2 of 2 keys)"]


def test_averaged_copy_beside_the_live_weights_is_left_out() -> None:
    source = weights("encoder.weight", "ema_module.n_averaged", "ema_module.module.encoder.weight")
    match = match_state_dict(source, ["encoder.weight"])
    assert match.state_dict["encoder.weight"] is source["encoder.weight"]
    assert match.averaged == ["ema_module.n_averaged", "ema_module.module.encoder.weight"]
    assert match.missing == match.unexpected == []


def test_averaged_copy_alone_is_used() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(Net())
    model = Net()
    match = load_state_dict(model, averaged.state_dict())
    assert match.averaged == ["n_averaged"]
    assert torch.equal(model.fc.weight, averaged.module.fc.weight)


def test_two_source_keys_for_one_target_key_are_refused_with_both_names() -> None:
    with pytest.raises(AmbiguousKeysError) as caught:
        match_state_dict(weights("encoder.weight", "module.encoder.weight"), ["encoder.weight"])
    assert "'encoder.weight'" in str(caught.value)
    assert "'module.encoder.weight'" in str(caught.value)


def test_two_names_of_one_tensor_for_one_target_key_are_no_conflict() -> None:
    (tensor,) = weights("x").values()
    match = match_state_dict(
        {"_forward_module.a.weight": tensor, "_original_module.a.weight": tensor}, ["a.weight"]
    )
    assert match.state_dict == {"a.weight": tensor}
    assert match.unexpected == []


def test_a_layer_called_module_beside_weights_of_the_same_name_is_read_consistently() -> None:
    target = ["weight", "module.weight"]
    wrapped = weights("module.weight", "module.module.weight")
    assert pairs(wrapped, target) == {"weight": "module.weight", "module.weight": "module.module.weight"}
    assert pairs(weights(*target), target) == {"weight": "weight", "module.weight": "module.weight"}


@pytest.mark.parametrize("leaf", ["_flat_param", "flat_param", "flat_param_0"])
def test_flattened_shards_are_not_reported_as_a_prefix_problem(leaf: str) -> None:
    source = weights(f"student.backbone._fsdp_wrapped_module.{leaf}")
    with pytest.raises(FlattenedShardsError, match="full state dict"):
        match_state_dict(source, ["backbone.patch_embed.proj.weight"])


@pytest.mark.parametrize("entry", ["state_dict", "model", "model_state_dict", "module", "network"])
def test_container_entry_is_found_and_named(entry: str) -> None:
    inner = weights("conv.weight", "fc.weight")
    source = {"epoch": 3, "global_step": 7, "callbacks": {}, "lr_schedulers": [], entry: inner}
    source["optimizer_states"] = [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}]
    match = match_state_dict(source, ["conv.weight", "fc.weight"])
    assert match.container == entry
    assert match.state_dict == inner
    assert match.missing == match.unexpected == []


def test_a_parameter_called_model_weight_is_no_container() -> None:
    source = weights("model.weight", "model.bias")
    match = match_state_dict(source, ["model.weight", "model.bias"])
    assert match.container is None
    assert match.renamed == {}


def test_live_weights_are_preferred_to_an_averaged_container() -> None:
    source = {"ema": weights("fc.weight"), "model": weights("fc.weight")}
    match = match_state_dict(source, ["fc.weight"])
    assert match.container == "model"
    assert match.other_containers == ["ema"]
    assert match_state_dict({"ema": source["ema"], "epoch": 1}, ["fc.weight"]).container == "ema"


def test_two_containers_of_one_kind_that_both_fit_are_refused() -> None:
    with pytest.raises(AmbiguousKeysError, match="'model', 'state_dict'"):
        match_state_dict({"model": weights("fc.weight"), "state_dict": weights("fc.weight")}, ["fc.weight"])
    generator = match_state_dict({"G": weights("up.weight"), "D": weights("down.weight")}, ["up.weight"])
    assert generator.container == "G"


def test_two_prefixes_that_fit_are_never_guessed_between() -> None:
    source = weights("student.backbone.weight", "teacher.backbone.weight")
    with pytest.raises(AmbiguousKeysError) as caught:
        match_state_dict(source, ["backbone.weight"])
    assert "'student.'" in str(caught.value)
    assert "'teacher.'" in str(caught.value)
    rules = [(r"^student\.", "")]
    assert match_state_dict(source, ["backbone.weight"], rules=rules).state_dict == {
        "backbone.weight": source["student.backbone.weight"]
    }


def test_shapes_decide_between_two_prefixes() -> None:
    source = {"a.fc.weight": torch.ones(2, 3), "b.fc.weight": torch.ones(5, 3)}
    match = match_state_dict(source, {"fc.weight": torch.zeros(5, 3)})
    assert match.state_dict["fc.weight"] is source["b.fc.weight"]


def test_another_prefix_is_accepted_where_the_whole_structure_fits_and_only_suggested_for_one_tensor() -> (
    None
):
    source = {"net.conv.weight": torch.ones(2, 3), "net.conv.bias": torch.ones(2)}
    target = {"backbone.conv.weight": torch.zeros(2, 3), "backbone.conv.bias": torch.zeros(2)}
    match = match_state_dict(source, target)
    assert match.rewrites == ["prefix 'net.' -> 'backbone.' (2 of 2 keys)"]
    with pytest.raises(NothingMatchedError) as caught:
        match_state_dict(weights("net.conv.weight"), weights("backbone.conv.weight"))
    text = str(caught.value)
    assert "'net.conv.weight'" in text
    assert "'backbone.conv.weight'" in text
    assert "end in 'conv.weight'" in text
    assert "'net.' -> 'backbone.'" in text
    match = match_state_dict(
        weights("net.conv.weight"), weights("backbone.conv.weight"), rules=[(r"^net\.", "backbone.")]
    )
    assert match.missing == []


def test_message_shows_five_names_of_each_side() -> None:
    with pytest.raises(NothingMatchedError) as caught:
        match_state_dict(weights(*(f"a{n}.x" for n in range(9))), weights(*(f"b{n}.y" for n in range(9))))
    assert str(caught.value).count("'a") == 5
    assert str(caught.value).count("'b") == 5
    assert "and 4 more" in str(caught.value)


def test_no_match_at_all_is_an_error_even_when_not_strict() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NothingMatchedError, match="none of its 1 keys"):
        load_state_dict(model, weights("something.else"), strict=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_missing_and_unexpected_keys_are_errors_only_when_strict() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model[0].weight.clone()
    source = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "2.weight": torch.ones(2)}
    with pytest.raises(KeysDifferError, match=r"2 of the model's 4 keys") as caught:
        load_state_dict(model, source)
    assert caught.value.match.missing == ["1.weight", "1.bias"]
    assert caught.value.match.unexpected == ["2.weight"]
    assert torch.equal(model[0].weight, before), "a refused load must leave the model alone"
    assert load_state_dict(model, source, strict=False).missing == ["1.weight", "1.bias"]
    assert torch.equal(model[0].weight, torch.ones(2, 2))


def test_another_shape_is_an_error_with_both_shapes_or_skipped_on_request() -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(3, 3), classifier=nn.Linear(3, 4)))
    before = model.classifier.weight.clone()
    source = nn.Sequential(OrderedDict(body=nn.Linear(3, 3), classifier=nn.Linear(3, 7))).state_dict()
    source = {f"module.{key}": value for key, value in source.items()}
    with pytest.raises(KeysDifferError, match=r"classifier.weight \[7, 3\] -> \[4, 3\]"):
        load_state_dict(model, source, strict=False)
    match = load_state_dict(model, source, ignore_mismatched=True)
    assert match.mismatched == [("classifier.weight", (7, 3), (4, 3)), ("classifier.bias", (7,), (4,))]
    assert torch.equal(model.classifier.weight, before)
    assert torch.equal(model.body.weight, source["module.body.weight"])


def test_metadata_follows_the_renamed_modules_and_the_input_keeps_its_own() -> None:
    source = nn.DataParallel(Net()).state_dict()
    versions = copy.deepcopy(source._metadata)
    keys = list(source)
    match = match_state_dict(source, Net())
    metadata = match.state_dict._metadata  # type: ignore[attr-defined]
    assert metadata["bn"] == {"version": 2}
    assert "" in metadata
    assert not [path for path in metadata if path.startswith("module")]
    assert list(source) == keys
    assert source._metadata == versions


def test_batch_norm_counter_may_be_missing_from_an_old_file_alone() -> None:
    source = {key: value for key, value in Net().state_dict().items() if "num_batches" not in key}
    assert load_state_dict(Net(), source).missing == []
    new = OrderedDict(source)
    new._metadata = Net().state_dict()._metadata  # type: ignore[attr-defined]
    with pytest.raises(KeysDifferError, match=r"bn\.num_batches_tracked"):
        load_state_dict(Net(), new)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_one_name_of_a_tied_weight_is_enough_and_the_tie_survives(name: str) -> None:
    model = TiedNet()
    value = torch.randn(5, 4)
    assert load_state_dict(model, {name: value}).missing == []
    assert torch.equal(model.embed.weight, value)
    assert model.head.weight is model.embed.weight


def test_tied_weights_with_two_different_values_are_refused() -> None:
    with pytest.raises(AmbiguousKeysError, match="share one tensor"):
        load_state_dict(TiedNet(), {"embed.weight": torch.ones(5, 4), "head.weight": torch.zeros(5, 4)})


def test_canonical_keys_are_the_eager_models_before_and_after_a_load() -> None:
    model = torch.compile(nn.Linear(8, 8))
    assert canonical_keys(model) == ["weight", "bias"]
    load_state_dict(model, model.state_dict())
    assert canonical_keys(model) == ["weight", "bias"] == canonical_keys(nn.Linear(8, 8))


def test_canonical_keys_keep_a_layer_that_is_really_called_module() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert canonical_keys(nn.DataParallel(torch.compile(Owner()))) == ["module.weight", "module.bias"]


def test_rules_rename_what_no_wrapper_explains_and_an_unused_rule_is_reported() -> None:
    source = weights(
        "module.features.denseblock1.denselayer1.norm.1.weight",
        "module.features.denseblock1.denselayer1.conv.2.weight",
    )
    target = [
        "features.denseblock1.denselayer1.norm1.weight",
        "features.denseblock1.denselayer1.conv2.weight",
    ]
    rules = [(r"\.(norm|conv)\.(\d)\.", r".\1\2."), (r"^nothing\.", "x.")]
    assert pairs(source, target, rules=rules) == dict(zip(target, source, strict=True))
    assert match_state_dict(source, target, rules=rules).unused_rules == [r"^nothing\."]
    with pytest.raises(ValueError, match="not a regular expression"):
        match_state_dict(source, target, rules=[("(", "")])


def test_unwrap_takes_off_wrappers_in_any_order() -> None:
    model = Net()
    assert unwrap(torch.compile(nn.DataParallel(model))) is model
    assert unwrap(nn.DataParallel(torch.compile(model))) is model
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert unwrap(averaged) is averaged


def test_a_model_on_meta_gets_the_tensors_themselves() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    source = nn.Linear(2, 2).state_dict()
    load_state_dict(model, source)
    assert torch.equal(model.weight, source["weight"])


def test_parametrizations_translate_their_old_names_themselves() -> None:
    old = nn.utils.weight_norm(nn.Linear(3, 2))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    load_state_dict(new, {f"module.{key}": value for key, value in old.state_dict().items()})
    x = torch.randn(4, 3)
    assert torch.allclose(new(x), old(x))
