"""What `help` and `inspect.signature` show of everything in `spec_local.__all__`."""

import inspect
import pydoc
import re

import pytest

import spec_local
from spec_local import GenerationSettings, Session

CLASSES = [name for name in spec_local.__all__ if inspect.isclass(getattr(spec_local, name))]
OF_PYTHON = re.compile(r"^ \|  (__(dataclass_fields|orig_bases)__ = |index\(self, value).*$", re.MULTILINE)
"""What Python adds to each dataclass and named tuple."""


def public_functions(kind):
    for name, function in inspect.getmembers(kind, callable):
        if not name.startswith("_") and getattr(function, "__module__", "").startswith("spec_local"):
            yield function


def signatures(kind):
    if kind is not spec_local.SpecLocalError:  # Python knows no signature of exceptions
        yield str(inspect.signature(kind))
    for function in public_functions(kind):
        yield str(inspect.signature(function))


@pytest.mark.parametrize("name", CLASSES)
def test_help_is_for_readers(name):
    kind = getattr(spec_local, name)
    texts = [OF_PYTHON.sub("", pydoc.plain(pydoc.render_doc(kind))), *signatures(kind)]
    for text in texts:
        for line in text.splitlines():
            assert len(line) <= 115, line  # a line of the sources, and its margin
            for ugly in ("lambda", "<function", "<built-in", "<factory>", "Annotated[", "FieldInfo"):
                assert ugly not in line, line
            assert not re.search(r"\d{12}", line), line
    for text in texts[1:]:
        assert "spec_local." not in text
        assert "collections.abc" not in text
        assert not re.search(r"Settings\(\w", text), text


def test_signatures_that_a_person_would_write():
    assert str(inspect.signature(Session.close)) == "(self) -> None"
    shown = str(inspect.signature(Session.open))
    for line in (
        "    draft: Path | str | None = None,",
        "    *,",
        "    n_ctx: int | None = None,",
        "    device: str = 'auto',",
        "    draft_vocab: int | Literal['auto', 'all'] = 'auto',",
        "    log: Callable[[str], None] | None = None,",
        ") -> Session",
    ):
        assert line in shown.splitlines()
    settings = str(inspect.signature(GenerationSettings)).splitlines()
    assert "    sampling: SamplingSettings = SamplingSettings()," in settings
    assert "    max_tokens: int | None = None," in settings
    assert "    prompt: str | Sequence[int] | ChatPrompt | Sequence[Mapping[str, object]]," in str(
        inspect.signature(Session.generate)
    )


def test_python_suggests_a_name():
    with pytest.raises(AttributeError, match="no attribute 'Sesion'") as caught:
        spec_local.Sesion  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("Sesion", spec_local)  # what its suggestion needs
