"""The child process that renders chat templates: hostile templates cost neither time nor memory."""

import os
import resource
import subprocess
import sys
import threading

import psutil
import pytest

from spec_local.chat import template_process
from spec_local.chat.template_process import TemplateFailed, TemplateProcess

GREETING = {"template": "Hello {{ messages[0].content }}!", "bos": "", "eos": ""}
MESSAGES = [{"role": "user", "content": "you"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TOO_SLOW, TOO_LARGE = "takes more than", "MiB"
SET = "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
HOSTILE = {
    "loops": (NESTED, TOO_SLOW),
    "a number": ("{% set x = messages | length + 8 %}{{ x ** (x ** x) }}", TOO_SLOW),
    "a long text": ("{{ messages[0].content * 10**11 }}", TOO_LARGE),
    "a wide text": ("{{ '%099999999999d' % 1 }}", TOO_LARGE),
    "indentation": ("{{ messages | tojson(indent=10**11) }}", TOO_LARGE),
    "long output": ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", f"{TOO_SLOW}|{TOO_LARGE}"),
    "doubled lists": (SET, TOO_LARGE),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "parentheses": ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "recursion|ended with code"),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
}


@pytest.fixture
def process():
    process = TemplateProcess()
    yield process
    process.stop()


def greet(process):
    return process.request(**GREETING, messages=MESSAGES)["text"]


@pytest.mark.parametrize(("template", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_refused(process, template, reason):
    process.max_memory = 200 << 20
    # On a busy machine, memory can take longer to fill than the strict limit.
    process.max_cpu_s = 10 if reason == TOO_LARGE else 0.2
    before = psutil.Process().memory_info().rss
    with pytest.raises(TemplateFailed, match=reason) as caught:
        process.request(template=template, bos="", eos="", messages=MESSAGES)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert greet(process) == "Hello you!"


@pytest.mark.parametrize(
    ("limit", "value", "template", "reason"),
    [
        ("max_cpu_s", 0.2, NESTED, "more than 0.2 s"),
        ("max_memory", 100 << 20, "{% set x = 'a' * (300 * 2**20) %}" + NESTED, "more than 100 MiB"),
    ],
    ids=["time", "memory"],
)
def test_limits_are_enforced_where_the_system_does_not(process, limit, value, template, reason):
    """The child got limits of 5 s and 1 GiB, so that only this process can enforce a lower one."""
    process.start()
    setattr(process, limit, value)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(TemplateFailed, match=reason):
        process.request(template=template, bos="", eos="", messages=MESSAGES)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 3


def test_the_child_gets_none_of_the_keys_in_the_environment(process, monkeypatch):
    for name in ("SPECDEC_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ANYTHING"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    assert greet(process) == "Hello you!"
    variables = psutil.Process(process._idle[0].pid).environ()
    assert "secret" not in variables.values()
    assert variables["TZ"] == "Asia/Kathmandu"  # for strftime_now
    assert variables.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


@pytest.mark.slow
def test_a_child_without_a_parent_ends():
    """As after kill -9 of the parent process: nobody watches the time."""
    request = b'{"template": "{{ 9**(9**9) }}", "bos": "", "eos": "", "messages": null}\n'
    command = [sys.executable, "-P", "-m", "spec_local.chat.jinja_renderer", "0", str(1 << 30)]
    done = subprocess.run(command, input=request, capture_output=True, timeout=60, check=False)
    assert template_process._cause_of_death(done.returncode, 0.2).startswith(
        TOO_SLOW.replace("takes", "it takes")
    )


def test_one_child_renders_everything(process):
    assert greet(process) == "Hello you!"
    (child,) = process._idle
    with pytest.raises(TemplateFailed, match="zero"):
        process.request(template="{{ 1 / 0 }}", bos="", eos="", messages=MESSAGES)
    assert greet(process) == "Hello you!"
    assert process._idle == [child]
    assert os.getpgid(child.pid) != os.getpgid(0)  # so that Ctrl-C in a terminal does not end it


def test_a_child_that_died_is_replaced(process):
    greet(process)
    (child,) = process._idle
    psutil.Process(child.pid).kill()
    child.wait()
    assert greet(process) == "Hello you!"


def test_an_interrupted_request_does_not_answer_the_next_one(process, monkeypatch):
    greet(process)
    with monkeypatch.context() as patch:

        def interrupt(process):
            raise KeyboardInterrupt

        patch.setattr(psutil.Process, "cpu_times", interrupt)
        with pytest.raises(KeyboardInterrupt):
            process.request(template=NESTED, bos="", eos="", messages=MESSAGES)
    assert greet(process) == "Hello you!"


def test_threads_share_the_child(process):
    replies = {}

    def ask(number):
        content = f"{number}" * 1000
        for _ in range(20):
            reply = process.request(**GREETING, messages=[{"role": "user", "content": content}])
            replies[number] = reply["text"] == f"Hello {content}!" and replies.get(number, True)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == dict.fromkeys(range(4), True)


def test_large_and_unusual_text_passes_unchanged(process):
    content = "\ud83d\ude00\udcff\0\r\n\u2028" + "é" * (1 << 20)
    reply = process.request(**GREETING, messages=[{"role": "user", "content": content}])
    assert reply == {"text": f"Hello {content}!", "content": [[6, 6 + len(content)]]}


def test_a_forked_process_starts_a_child_of_its_own():
    code = (
        "import os\n"
        "from spec_local.chat.template_process import process\n"
        "def text(): return process.request("
        "template='{{ messages[0].content }}', bos='', eos='', "
        "messages=[{'role': 'user', 'content': str(os.getpid())}])['text'] == str(os.getpid())\n"
        "assert text()\n"
        "first, pid = process._idle[0].pid, os.fork()\n"
        "same = text() and process._idle[0].pid == first\n"
        "if not pid: process.stop(); os._exit(0 if not same else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and same\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_a_value_that_is_nested_too_deeply_is_not_sent(process):
    nested = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(TemplateFailed, match="nested too deeply"):
        process.request(template="a", bos="", eos="", messages=[], tools=nested)
    assert process.request(template="a", bos="", eos="", messages=[])["text"] == "a"
