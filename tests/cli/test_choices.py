"""Test that the choices of options are those of the library."""

import os
import subprocess
import sys
from typing import get_args

from spec_local import kernels
from spec_local.llama.context import CACHE_TYPES
from spec_local.policies import POLICY_NAMES
from spec_local.proposers import PROPOSER_NAMES, SHAPE_NAMES
from spec_local.verifiers import VERIFIER_NAMES
from specdec_cli.options import (
    CacheChoice,
    KernelsChoice,
    PolicyChoice,
    ProposerChoice,
    ShapeChoice,
    VerifierChoice,
)


def test_choices():
    assert get_args(VerifierChoice) == VERIFIER_NAMES
    assert get_args(ShapeChoice) == SHAPE_NAMES
    assert get_args(ProposerChoice) == PROPOSER_NAMES
    assert get_args(PolicyChoice) == POLICY_NAMES
    assert set(get_args(CacheChoice)) == set(CACHE_TYPES)
    assert get_args(KernelsChoice) == tuple(kernels.MODES)


def test_help_lists_new_names():
    """A new proposer, policy or verifier needs nothing but a line in the table of its package."""
    script = (
        "from spec_local import policies, proposers, verifiers\n"
        "for package in (policies, proposers, verifiers):\n"
        "    for name in [n for n in vars(package) if n.endswith('_NAMES')]:\n"
        "        new = 'new-' + name.removesuffix('_NAMES').lower()\n"
        "        setattr(package, name, (*getattr(package, name), new))\n"
        "import sys\n"
        "sys.argv = ['specdec', 'generate', '--help']\n"
        "from specdec_cli.__main__ import main\n"
        "main()\n"
    )
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    for kind in ("proposer", "policy", "verifier", "shape"):
        assert f"new-{kind}" in done.stdout
