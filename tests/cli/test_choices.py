"""Test that the choices of options are those of the library."""

from typing import get_args

from spec_local import kernels
from spec_local.llama.context import CACHE_TYPES
from spec_local.settings import CROSS_VOCAB, POLICIES, PROPOSERS, SHAPES
from spec_local.verifiers import VERIFIERS
from specdec_cli.options import (
    CacheChoice,
    CrossVocabChoice,
    KernelsChoice,
    PolicyChoice,
    ProposerChoice,
    ShapeChoice,
    VerifierChoice,
)


def test_choices():
    assert get_args(VerifierChoice) == ("auto", *VERIFIERS)
    assert set(get_args(ShapeChoice)) == set(SHAPES)
    assert set(get_args(ProposerChoice)) == set(PROPOSERS)
    assert get_args(PolicyChoice) == tuple(POLICIES)
    assert get_args(CrossVocabChoice) == tuple(CROSS_VOCAB)
    assert set(get_args(CacheChoice)) == set(CACHE_TYPES)
    assert get_args(KernelsChoice) == tuple(kernels.MODES)
