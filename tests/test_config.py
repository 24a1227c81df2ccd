"""Parameters: both ways to write them, their defaults, and a clear refusal of everything else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_twobit.config import TwoBitConfig, describe
from hvd_twobit.errors import ConfigError, TwoBitError

BAD_THRESHOLDS = [0, 0.0, -0.0, math.nan, math.inf, -math.inf, True, False, "0.5", None, [0.5], 1e-46, 1e39, 10**400,
                  np.float64(1e300), np.array([0.5])]
SHORT = "{!r:.12}".format


def test_levels_are_adaptive_unless_a_threshold_is_given() -> None:
    config = TwoBitConfig.from_arguments()
    assert config == TwoBitConfig.from_arguments("auto") == TwoBitConfig()
    assert config.adaptive and config.block_elements == 1024 and config.min_elements == 1024
    assert config.uncompressed_steps == 1 and config.warmup_steps == 0
    assert not TwoBitConfig.from_arguments(0.5).adaptive


def test_warm_up_comes_on_top_of_the_step_from_which_levels_are_learnt() -> None:
    assert TwoBitConfig.from_arguments(warmup_steps=5).uncompressed_steps == 6
    assert TwoBitConfig.from_arguments(0.5, warmup_steps=5).uncompressed_steps == 5
    assert TwoBitConfig.from_arguments(0.5).uncompressed_steps == 0


@pytest.mark.parametrize("value", [0, 8, 17, -16, 1.5, "16", True, 2**31])
def test_an_unusable_size_of_blocks_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="block_elements must be"):
        TwoBitConfig.from_arguments(block_elements=value)


@pytest.mark.parametrize("value", [-1, 1.5, "8", True])
def test_an_unusable_warm_up_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="warmup_steps must be"):
        TwoBitConfig.from_arguments(warmup_steps=value)


def test_blocks_and_a_fixed_threshold_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="block_elements=512 belongs to threshold='auto'"):
        TwoBitConfig.from_arguments(0.5, block_elements=512)


@pytest.mark.parametrize("value", ["Auto", "atuo", "automatic"])
def test_auto_misspelt_is_refused_with_a_hint(value: str) -> None:
    with pytest.raises(ConfigError, match=f"threshold must be a number .* or 'auto', not '{value}'"):
        TwoBitConfig.from_arguments(value)


def test_auto_beside_a_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave out negative_threshold=-0.2"):
        TwoBitConfig.from_arguments("auto", negative_threshold=-0.2)


def test_one_threshold_alone_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="are given together"):
        TwoBitConfig(0.5)


def test_threshold_stands_for_both_sides() -> None:
    assert TwoBitConfig.from_arguments(0.25) == TwoBitConfig(0.25, -0.25)


def test_one_side_given_leaves_the_default_of_the_other() -> None:
    assert TwoBitConfig.from_arguments(positive_threshold=2.0) == TwoBitConfig(2.0, -0.5)


def test_thresholds_are_rounded_to_float32() -> None:
    assert TwoBitConfig.from_arguments(0.1).positive_threshold == float(np.float32(0.1))
    assert TwoBitConfig.from_arguments(4e-7).positive_threshold == float(np.float32(4e-7))
    assert TwoBitConfig.from_arguments(1e-45).positive_threshold == float(np.float32(1e-45))


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), 1, np.int64(1)])
def test_any_real_number_is_a_threshold(number: Any) -> None:
    assert TwoBitConfig.from_arguments(number).positive_threshold == float(number)


@given(st.floats(min_value=float(np.float32(1e-45)), max_value=float(np.finfo(np.float32).max), width=32))
def test_every_positive_float32_is_kept_exactly(value: float) -> None:
    config = TwoBitConfig.from_arguments(value)
    assert (config.positive_threshold, config.negative_threshold) == (value, -value)


@pytest.mark.parametrize("value", [value for value in BAD_THRESHOLDS if value is not None], ids=SHORT)
@pytest.mark.parametrize("name", ["threshold", "positive_threshold", "negative_threshold"])
def test_an_unusable_threshold_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        TwoBitConfig.from_arguments(**{name: value})


@pytest.mark.parametrize("arguments", [dict(threshold=-0.5), dict(positive_threshold=-0.5),
                                       dict(negative_threshold=0.5),
                                       dict(positive_threshold=-0.5, negative_threshold=0.5)])
def test_a_threshold_of_the_wrong_sign_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be (above|below) zero, not"):
        TwoBitConfig.from_arguments(**arguments)


def test_both_ways_to_give_thresholds_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave out positive_threshold=0.2"):
        TwoBitConfig.from_arguments(0.5, positive_threshold=0.2)


@pytest.mark.parametrize("value", [-1, 1.5, "8", True, math.nan])
def test_an_unusable_min_elements_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="min_elements"):
        TwoBitConfig.from_arguments(min_elements=value)


@pytest.mark.parametrize("unknown, nearest", [("treshold", "threshold"), ("pos_threshold", "positive_threshold"),
                                              ("min_element", "min_elements")])
def test_an_unknown_argument_is_refused_with_the_nearest_one(unknown: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown argument {unknown}=0.5 \(did you mean {nearest}\?\)"):
        TwoBitConfig.from_arguments(**{unknown: 0.5})


def test_an_argument_like_no_other_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="known: threshold, positive_threshold, negative_threshold, min_elements"):
        TwoBitConfig.from_arguments(zzz=1)


def test_mxnets_dictionaries_are_understood() -> None:
    full = {"compress": "2bit", "positive_threshold": 0.25, "negative_threshold": -0.75}
    assert TwoBitConfig.from_params(full) == TwoBitConfig(0.25, -0.75)
    assert TwoBitConfig.from_params({"compress": "2bit"}) == TwoBitConfig(0.5, -0.5)
    assert TwoBitConfig.from_params({"type": "2bit", "threshold": 0.125}) == TwoBitConfig(0.125, -0.125)
    assert TwoBitConfig.from_params({"type": "2bit"}) == TwoBitConfig(0.5, -0.5)


def test_further_arguments_go_beside_the_dictionary() -> None:
    assert TwoBitConfig.from_params({"compress": "2bit"}, min_elements=0) == TwoBitConfig(0.5, -0.5, 0)
    with pytest.raises(ConfigError, match="those of the dictionary"):
        TwoBitConfig.from_params({"compress": "2bit"}, threshold=0.1)
    with pytest.raises(ConfigError, match="did you mean min_elements"):
        TwoBitConfig.from_params({"compress": "2bit"}, min_element=0)


@pytest.mark.parametrize("params, message", [
    ({"compress": "2bit", "pos_threshold": 0.5}, r"pos_threshold=0.5 \(did you mean positive_threshold\?\)"),
    ({"type": "2bit", "treshold": 0.5}, r"treshold=0.5 \(did you mean threshold\?\)"),
    ({"compress": "2bit", "threshold": 0.5}, "unknown key threshold=0.5"),
    ({"compress": "1bit"}, "'compress': '1bit' is not a compression"),
    ({"compress": "2Bit"}, "did you mean 2bit"),
    ({"compress": None}, "'compress': None"),
    ({"type": 2}, "'type': 2"),
    ({"compress": "2bit", "type": "2bit"}, "two different forms"),
    ({}, 'the key "compress" is missing'),
    ({"positive_threshold": 0.5}, 'the key "compress" is missing'),
    ({"compres": "2bit"}, r"compres='2bit' \(did you mean compress\?\)"),
    ({3: "2bit"}, "unknown key 3"),
    ("2bit", "takes a dictionary"),
    (None, "takes a dictionary"),
    ([("compress", "2bit")], "takes a dictionary"),
])
def test_a_dictionary_that_is_not_mxnets_is_refused(params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TwoBitConfig.from_params(params)


@pytest.mark.parametrize("value", BAD_THRESHOLDS, ids=SHORT)
@pytest.mark.parametrize("selector, key", [("compress", "positive_threshold"), ("compress", "negative_threshold"),
                                           ("type", "threshold")])
def test_an_unusable_value_in_a_dictionary_is_refused_with_its_key(selector: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        TwoBitConfig.from_params({selector: "2bit", key: value})


def test_errors_are_of_one_family_and_also_value_errors() -> None:
    assert issubclass(ConfigError, TwoBitError) and issubclass(ConfigError, ValueError)


def test_description_names_the_arguments_that_make_the_configuration() -> None:
    for config in (TwoBitConfig(), TwoBitConfig(0.25, -0.75, 0), TwoBitConfig(0.25, -0.25, warmup_steps=3),
                   TwoBitConfig(None, None, 5, 7, 160)):
        assert eval(f"TwoBitConfig.from_arguments({describe(config)})") == config


def test_the_environment_overrides_the_transport_that_a_script_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TwoBitConfig.from_arguments().transport == "auto"
    assert TwoBitConfig.from_arguments(transport="sra").transport == "sra"
    monkeypatch.setenv("HVD_TWOBIT_TRANSPORT", "allreduce")
    assert TwoBitConfig.from_arguments().transport == "allreduce"
    assert TwoBitConfig.from_arguments(transport="sra").transport == "allreduce"
    assert TwoBitConfig.from_params({"compress": "2bit"}).transport == "allreduce"


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), "25", True])
def test_a_bucket_has_a_size_above_zero(size: Any) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb must be"):
        TwoBitConfig.from_arguments(bucket_cap_mb=size)
