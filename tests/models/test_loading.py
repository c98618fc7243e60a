"""A directory is loaded without output and without other files, or refused with a clear line."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from tiny_models import tiny_model

from pagetile import RequestError
from pagetile.models import load_model, load_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model's directory with a tokenizer, not to be written to."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(directory)
    words = Tokenizer(WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(directory)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("something tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def shard(directory) -> list[str]:
    """Split a checkpoint's weights into two files and an index."""
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    halves = {"model-1.safetensors": names[:10], "model-2.safetensors": names[10:]}
    for name, part in halves.items():
        save_file({key: weights[key] for key in part}, directory / name, {"format": "pt"})
    places = {key: name for name, part in halves.items() for key in part}
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    return list(halves)


def change_config(directory, **changes) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def change_weights(directory, change) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def same_weights(model, expected) -> bool:
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# What can be read.


def test_a_directory_is_read_as_it_was_saved(saved, offline):
    model = load_model(saved)
    assert same_weights(model._model, tiny_model("llama"))
    assert (model.dtype, model.eos_token_ids, model.vocab_size) == (torch.float32, (2, 5), 96)


def test_weights_in_several_files_are_read(directory):
    shard(directory)
    assert same_weights(load_model(str(directory))._model, tiny_model("llama"))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_weights_are_converted_when_asked_for(saved, dtype):
    model = load_model(saved, dtype=dtype)
    assert model.dtype == torch.bfloat16
    assert model._model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_checkpoints_own_dtype_is_kept(directory):
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(directory)
    assert load_model(directory).dtype == torch.bfloat16


def test_tied_weights_are_not_missing(directory):
    tied = tiny_model("llama", tie_word_embeddings=True)
    tied.tie_weights()
    tied.save_pretrained(directory)
    load_model(directory)


def test_nothing_is_printed(saved, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(saved)
    load_tokenizer(saved)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_long_text_is_tokenized_without_a_warning():
    """The engine's error says what a sequence may have."""
    from pagetile.demo import path

    handler, warned = logging.Handler(), []
    handler.emit = warned.append
    library = logging.getLogger("transformers")  # it does not propagate
    library.addHandler(handler)
    try:
        assert len(load_tokenizer(path()).encode("a " * 5000)) > 4096
    finally:
        library.removeHandler(handler)
    assert not warned


def test_transformers_is_imported_only_when_a_model_is_loaded():
    code = "import pagetile.models, sys; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# What cannot: each in one line that names the place.


def refused(directory, *words: str, **options) -> str:
    with pytest.raises(RequestError) as caught:
        load_model(directory, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    for word in words:
        assert word in message
    return message


def test_a_name_is_no_directory(offline):
    refused("meta-llama/Llama-3.2-1B", "'meta-llama/Llama-3.2-1B' does not exist", "fetch it first")


def test_a_file_is_no_directory(saved):
    refused(saved / "config.json", "is a file, expected a directory")


def test_no_config(directory):
    (directory / "config.json").unlink()
    refused(directory, f"{directory} has no config.json")


@pytest.mark.parametrize("text", ["", "{", "\xff\xfe"])
def test_a_garbled_config(directory, text):
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    refused(directory, f"{directory / 'config.json'} is not JSON", "download it again")


@pytest.mark.parametrize("text", ["[1, 2]", '"llama"', "3"])
def test_a_config_that_is_no_object(directory, text):
    (directory / "config.json").write_text(text)
    refused(directory, f"{directory / 'config.json'} holds a", "expected a JSON object")


@pytest.mark.parametrize("model_type", ["quasi_llama", None, 7])
def test_an_unknown_model_type(directory, model_type):
    change_config(directory, model_type=model_type)
    refused(directory, f"model_type {model_type!r}", "does not know: update it")


def test_a_config_with_impossible_values(directory):
    change_config(directory, hidden_size="wide")
    refused(directory, str(directory / "config.json"), "'hidden_size' expected int, got str")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "quasi_silu"}, "value is missing, unknown or .*KeyError: 'quasi_silu'"),
        ({"rope_parameters": {"rope_type": "quasi", "rope_theta": 1e4}}, "missing, unknown or of"),
        ({"dtype": "quasi_float"}, "missing, unknown or of another type"),
        ({"num_attention_heads": 0}, "a number is 0 that must not be"),
        ({"num_key_value_heads": 0}, "a number is 0 that must not be"),
    ],
    ids=str,
)
def test_a_config_whose_error_would_be_a_bare_text(directory, changes, reason):
    """Such as "cannot be loaded: 'quasi_silu'"."""
    change_config(directory, **changes)
    assert re.search(reason, refused(directory, str(directory)))


def test_a_checkpoints_code_is_not_run(directory, tmp_path):
    marker = tmp_path / "ran"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass Evil: pass"
    (directory / "evil.py").write_text(code)
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    change_config(directory, model_type="evil", auto_map=auto_map)
    refused(directory, "code from a checkpoint is not run")
    change_config(directory, model_type="llama", auto_map=auto_map)
    load_model(directory)
    assert not marker.exists()


def test_no_weights(directory):
    (directory / "model.safetensors").unlink()
    refused(directory, f"{directory} has no model.safetensors: download it")


def test_weights_in_a_format_that_can_run_code(directory):
    (directory / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), directory / "pytorch_model.bin")
    refused(directory, "convert the weights to safetensors")


def test_a_missing_shard(directory):
    names = shard(directory)
    (directory / names[1]).unlink()
    refused(directory, f"has no {names[1]}")
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(names[1], f"parts/{names[1]}"))
    refused(directory, f"has no parts/{names[1]}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("[]", "holds a list, expected a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": 3}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {"a": [1], "b": "b.safetensors"}}', "has no weight_map"),
    ],
)
def test_a_garbled_index(directory, text, reason):
    shard(directory)
    (directory / "model.safetensors.index.json").write_text(text)
    refused(directory, f"model.safetensors.index.json {reason}")


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_weights(directory, size):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(directory, f"{path} is truncated or no safetensors file", "download it again")


def test_garbled_weights(directory):
    (directory / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 100)
    refused(directory, "is truncated or no safetensors file")


def test_a_weight_of_another_shape(directory):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(directory, lambda weights: weights.update({name: torch.zeros(80, 40)}))
    refused(directory, f"weight {name} has shape [80, 40], expected [80, 48]:")


def test_a_config_of_another_size(directory):
    change_config(directory, intermediate_size=88)
    refused(directory, "expected [48, 88]", "(and 8 more)", "config.json belongs to another model")


def test_a_missing_weight_is_not_made_up(directory):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(directory, lambda weights: weights.pop(name))
    refused(directory, f"weight {name} is missing: the checkpoint is incomplete")


def test_missing_layers(directory):
    change_config(directory, num_hidden_layers=5)
    refused(directory, "weight model.layers.3.", "is missing (and 17 more)")


def test_unused_weights_are_reported(directory, capfd):
    change_config(directory, num_hidden_layers=2)
    with pytest.warns(UserWarning, match=r"weight model\.layers\.2\..* is not used \(and 8 more\)"):
        load_model(directory)
    assert capfd.readouterr() == ("", "")  # not a second time, by Transformers


def test_a_limit_is_checked_before_the_weights_are_read(directory):
    (directory / "model.safetensors").unlink()
    refused(directory, "this model has 256 positions", max_model_len=300)


@pytest.mark.parametrize("device", ["cuda:99", "warp", "meta:x"])
def test_a_device_that_is_not_there(saved, device):
    refused(saved, f"device {device!r} cannot be used", device=device)


@pytest.mark.parametrize("dtype", ["int8", "floaty", torch.int64, 3])
def test_a_dtype_that_is_none(saved, dtype):
    refused(saved, f"dtype is {dtype!r}, expected 'auto'", dtype=dtype)


def test_a_given_model_is_not_rounded():
    with pytest.raises(RequestError, match=r"is torch\.float32 but dtype=bfloat16 is asked for"):
        load_model(tiny_model("llama"), dtype="bfloat16")
    load_model(tiny_model("llama"), dtype="float32")


# Tokenizers.


def test_a_tokenizer_is_read(saved, offline):
    tokenizer = load_tokenizer(saved)
    assert tokenizer is not None
    assert tokenizer("hello world")["input_ids"] == [1, 2]


def test_a_checkpoint_need_not_have_a_tokenizer(directory):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert load_tokenizer(directory) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tokenizer.json is not JSON"),
        ("{", "tokenizer.json is not JSON"),
        ("{}", "its tokenizer cannot be read"),
        ('{"model": 3}', "its tokenizer cannot be read"),
    ],
)
def test_a_garbled_tokenizer(directory, text, message):
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(RequestError, match=message) as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_no_directory():
    with pytest.raises(RequestError, match="expected a directory"):
        load_tokenizer("gpt2")
