"""The models of the suite: published sizes, and twins that fit."""

import pytest

from lastgood.errors import ConfigError
from lastgood.experiments.dcp.models import MODELS, build_on_meta, layers_of, model_bytes


@pytest.mark.parametrize(
    "name, millions, layers",
    # Published counts: Touvron et al. 2023, tables 2 and 1; Dosovitskiy et al. 2021, table 1; Sanh et al. 2022.
    [("L7b", 6738, 32), ("L13b", 13016, 40), ("L70b", 68977, 80), ("vit-base", 86, 12), ("T0_3B", 2850, 48)],
)
def test_models_are_as_large_as_published(name, millions, layers):
    model = build_on_meta(name)
    assert model_bytes(model) / 4e6 == pytest.approx(millions, rel=0.025)
    assert len(layers_of(model)) == layers
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("MB")])
def test_a_twin_fills_most_of_its_size_and_has_layers_to_spread(name):
    most = int(name.rpartition("-")[2].removesuffix("MB")) * 10**6
    model = build_on_meta(name)
    assert 0.6 * most < model_bytes(model) <= most
    assert len(layers_of(model)) >= 2


def test_an_unknown_model_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"model 'L8b' is unknown; known: L7b, .*T0_3B-256MB"):
        build_on_meta("L8b")


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 406)])
def test_the_models_of_mlperf_are_as_large_as_llama_3(name, billions):
    # Grattafiori et al. 2024, table 3; MLPerf's 70B has narrower heads, which changes no count of parameters.
    assert model_bytes(build_on_meta(name)) / 4e9 == pytest.approx(billions, rel=0.02)
