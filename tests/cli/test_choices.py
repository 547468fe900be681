"""What the command offers is what the library has; names stand twice so that --help needs no numpy."""

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
    assert [c.value for c in VerifierChoice] == ["auto", *VERIFIERS]
    assert {c.value for c in ShapeChoice} == set(SHAPES)
    assert {c.value for c in ProposerChoice} == set(PROPOSERS)
    assert [c.value for c in PolicyChoice] == list(POLICIES)
    assert [c.value for c in CrossVocabChoice] == list(CROSS_VOCAB)
    assert {c.value for c in CacheChoice} == set(CACHE_TYPES)
    assert [c.value for c in KernelsChoice] == list(kernels.MODES)
