import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagetile.engine import sampling_params
from pagetile.engine.sampling_params import SamplingParams
from pagetile.errors import RequestError

NAN, INF = math.nan, math.inf


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logit_bias": (),
        "logprobs": None,
        "prompt_logprobs": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "structured_outputs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
    }


REFUSED = [
    *[("temperature", value) for value in (-0.1, NAN, INF, -INF, "0.7", None, True, 10**400, [1])],
    *[("top_p", value) for value in (0.0, 0, -0.5, 1.0001, NAN, INF, "0.9", None, True)],
    *[("min_p", value) for value in (-0.01, 1.01, NAN, "0", None, False)],
    *[("presence_penalty", value) for value in (-2.01, 2.01, NAN, INF, "1", True)],
    *[("frequency_penalty", value) for value in (-2.01, 2.01, NAN, -INF, "1", True)],
    *[("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF, "1.1", None, True)],
    *[("n", value) for value in (0, -1, 1.0, "1", None, True)],
    *[("top_k", value) for value in (-2, 1.0, "5", None, True)],
    *[("seed", value) for value in (1.0, "7", True, NAN, [1])],
    *[("max_tokens", value) for value in (0, -1, 16.0, "16", True)],
    *[("min_tokens", value) for value in (-1, 0.0, "1", None, True)],
    *[("logprobs", value) for value in (-1, 5.0, "5", True)],
    *[("stop", value) for value in ("", [""], ["a", ""], ["a", 1], 5, b"a", {"a": 1}, [b"a"])],
    *[("stop_token_ids", value) for value in ([-1], [1, -1], [1.0], [True], ["1"], "12", 3, b"1")],
    *[("bad_words", value) for value in ("", [""], 5, [b"a"])],
    *[("allowed_token_ids", value) for value in ([], [-1], [True], "12", 3)],
    *[("logit_bias", value) for value in (5, "ab", [1], {-1: 0}, {"a": 1}, {1: 101}, {1.5: 1})],
    *[
        ("logit_bias", value)
        for value in ({1: NAN}, {1: None}, {1: INF}, {0: 10**400}, {5: "1"}, {True: 2})
    ],
    *[("ignore_eos", value) for value in (1, "false", None)],
    *[("detokenize", value) for value in (0, "true", None)],
    *[("skip_special_tokens", value) for value in (1, None)],
    *[("include_stop_str_in_output", value) for value in (1, None)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda x: str(x)[:20])
def test_a_bad_value_is_refused_with_its_name_and_itself(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}={value!r}: expected ")


EDGES = {
    "temperature": (0.0, 1e-300, 1e300),
    "top_p": (1e-300, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-300, 1e300),
    "n": (1, 1000),
    "top_k": (0, 1, 10**9),
    "seed": (0, -2, 2**200, -(2**200), None),
    "max_tokens": (1, 10**9, None),
    "min_tokens": (0, 16),
    "logprobs": (0, 10**9, None),
}


@pytest.mark.parametrize(("name", "values"), EDGES.items())
def test_the_ends_of_every_range_are_allowed(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="no option 'best_of'"):
        SamplingParams(best_of=2)
    with pytest.raises(TypeError, match="no option 'temprature'; did you mean temperature"):
        SamplingParams(temprature=0)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(RequestError, match=r"min_tokens=17 is more than max_tokens=16"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17


def test_stop_strings_without_text_are_refused():
    with pytest.raises(RequestError, match="detokenize=False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("given", "stored"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))]
)
def test_stop_is_stored_as_a_tuple(given, stored):
    assert SamplingParams(stop=given).stop == stored


def test_stop_token_ids_are_stored_as_a_tuple_of_ints():
    stored = SamplingParams(stop_token_ids=[np.int64(3), 4]).stop_token_ids
    assert stored == (3, 4)
    assert {type(token_id) for token_id in stored} == {int}
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_logit_bias_is_stored_as_pairs_in_order():
    params = SamplingParams(logit_bias={np.int64(7): -100, 3: np.float32(0.5)})
    assert params.logit_bias == ((3, 0.5), (7, -100.0))
    assert [type(x) for x in params.logit_bias[1]] == [int, float]
    assert dataclasses.replace(params, n=2).logit_bias == params.logit_bias
    assert SamplingParams(logit_bias=None).logit_bias == ()
    assert isinstance(hash(params), int)


def test_what_vllm_s_clients_send_for_none_is_stored_as_such():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)


def test_numpy_numbers_become_plain_ones():
    params = SamplingParams(temperature=np.float32(0.5), n=np.int64(2), top_p=1)
    assert [type(x) for x in (params.temperature, params.n, params.top_p)] == [float, int, float]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, False), ({"temperature": 0}, True), ({"top_k": 1}, True), ({"top_k": 2}, False)],
)
def test_greedy_is_temperature_zero_or_top_k_one(options, expected):
    assert SamplingParams(**options).is_greedy is expected


def test_is_frozen_and_hashable_and_replace_checks_again():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_p = 0.5
    assert {params: 1}[SamplingParams(stop="a", stop_token_ids=(1,))] == 1
    with pytest.raises(RequestError, match=r"top_p=7"):
        dataclasses.replace(params, top_p=7)


def test_needs_no_torch():
    source = Path(sampling_params.__file__)
    code = (
        "import sys, types; sys.modules['torch'] = None\n"
        f"for name, path in (('p', {str(source.parents[1])!r}), ('p.e', {str(source.parent)!r})):\n"
        "    sys.modules[name] = package = types.ModuleType(name); package.__path__ = [path]\n"
        "import p.e.sampling_params"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
