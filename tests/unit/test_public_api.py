"""The names that `import spec_local` offers, and the imports that it avoids."""

import subprocess
import sys

import pytest

import spec_local


def test_every_public_name_exists_and_is_documented():
    assert len(set(spec_local.__all__)) == len(spec_local.__all__)
    for name in spec_local.__all__:
        value = getattr(spec_local, name)
        assert name == "__version__" or value.__name__ == name
        assert name == "__version__" or value.__doc__


def test_star_import_and_unknown_names():
    space = {}
    exec("from spec_local import *", space)
    assert set(spec_local.__all__) <= set(space)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = spec_local.nothing_of_this_name


def test_dir_lists_the_names_before_they_are_imported():
    script = "import spec_local\nprint(*dir(spec_local))\nassert 'Session' not in vars(spec_local)\n"
    listed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert set(spec_local.__all__) <= set(listed.stdout.split())


def test_importing_loads_nothing_heavy():
    script = (
        "import sys, spec_local\n"
        "slow = {'numpy', 'llama_cpp', 'typer', 'pydantic', 'gguf'} & set(sys.modules)\n"
        "assert not slow, slow\n"
        "spec_local.SpecLocalError, spec_local.SamplingSettings\n"
        "assert 'llama_cpp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_errors_form_one_documented_tree():
    from spec_local import errors

    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    assert len(kinds) > 5
    for kind in kinds:
        assert issubclass(kind, errors.SpecLocalError)
        assert kind.__name__ in errors.__doc__
