"""Ceilings of libtpu's static estimates: what a change may cost before someone looks at it."""

import math

import pytest

from pallas_kernels import aot
from pallas_kernels.cycles import CODES, Case, profile
from pallas_kernels.seal import cycles as seal_cycles

pytestmark = pytest.mark.skipif(not aot.available(), reason="needs libtpu, of the extra kvjax[aot]")

#: (cycles, bundles) per 1,024 tokens of a KV head, eight heads of dim 128, rows of 4,096 tokens
CEILINGS = {
    ("v5e", "int8"): (285, 255),
    ("v5e", "int4"): (220, 200),
    ("v6e", "int8"): (210, 155),
    ("v6e", "int4"): (200, 155),
}
#: the same of keys that are turned in the kernel
TURNED = {("v5e", "int8"): (405, 375), ("v6e", "int8"): (282, 240)}
#: of a page of eight heads of 128, quantised and packed
SEALED = {("v5e", "int8"): (2060, 1800), ("v6e", "turboquant4"): (3950, 3600)}


@pytest.mark.parametrize(("chip", "code"), CEILINGS)
def test_the_recorded_estimates_hold(chip, code):
    assert_under(profile(Case(chip, code)), *CEILINGS[chip, code])


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "bundles"), [("v5e", 835), ("v6e", 725)])
def test_the_recorded_estimates_of_kvquant_hold(chip, bundles):
    assert profile(Case(chip, "kvquant3", turned=True)).bundles <= bundles


@pytest.mark.parametrize(("chip", "code"), TURNED)
def test_the_recorded_estimates_of_turned_keys_hold(chip, code):
    assert_under(profile(Case(chip, code, turned=True)), *TURNED[chip, code])


@pytest.mark.parametrize(("chip", "codec"), SEALED)
def test_the_recorded_estimates_of_sealing_hold(chip, codec):
    assert_under(seal_cycles.profile(chip, codec), *SEALED[chip, codec])


def assert_under(got, cycles, bundles):
    assert got.cycles <= cycles
    assert got.bundles <= bundles


def test_floors_are_bytes_over_bandwidth():
    """8.125 bits a number: 264 kB for 1,024 tokens of a head's keys and values."""
    case = Case("v5e", "int8")
    assert math.isclose(case.floor, 1024 * 256 * 8.125 / 8 / 819e9 * 1.5e9)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("code", CODES)
def test_every_code_has_an_estimate(chip, code):
    got = profile(Case(chip, code))
    assert got.bundles > 0
    assert math.isnan(got.cycles) or got.cycles >= got.bundles / 2
