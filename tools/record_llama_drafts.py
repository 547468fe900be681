"""Record what llama.cpp's own loop drafts with the tiny heads, as data for tests/llama/test_heads.py.

    python -m tools.record_llama_drafts PATH/TO/llama-speculative-simple [KIND …]

Kinds of heads that are not named keep what is recorded.
The program is an example of llama.cpp (target llama-speculative-simple of its CMake build), at the commit
that llama-cpp-python is pinned to. Its log lists the most probable tokens of each draft step, and how many
draft tokens were accepted. The loop of DFlash2 does not log its draft tokens: they are read from the calls
that verify them. The temperature is 0, and the caches are in F32, as in the test.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import write_tiny_block_head
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_mtp import write_tiny_mtp

DATA = Path(__file__).parents[1] / "tests" / "data" / "llama_drafts.json"
PROMPTS = (
    *("the of and to in is you", "Which water has been called long?", "x", "one two one two one two one"),
    *("Who are you?", "a", "time", "He said that they had not been there before.", "1 2 3 4 5 6 7 8 9"),
    *("There are many words in this text", "(a + b) * c", "No", "people made it long after", "Wörter"),
    *("find the first one, and then use it", "water water water water", "How?", "my, your, his, her, its"),
    *("It was the best of times, it was the other of times", "down over out up"),
)
N_DRAFT, N_OUTPUT = 4, 48
# The text is between the lines of the log, so that they may begin anywhere.
_EVENT = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) |accepted (\d+)/\d+ draft tokens")

# Calls that the log lists with LLAMA_BATCH_DEBUG, and their tokens, with whether logits are wanted.
_CALL, _NEXT_CALL = "added ubatch to split:", "input batch info:"
_TOKEN = re.compile(r": id = +(\d+) .*?, output = (\d)", re.DOTALL)


def write_models(folder):
    """Write the models to a folder. Returns for each kind of head the main model and the head's own file."""
    return {
        "eagle": (
            write_tiny_main(folder / "main.gguf"),
            write_tiny_eagle(folder / "eagle.gguf", with_tokenizer=True),
        ),
        "mtp": (write_tiny(folder / "mtp.gguf", "qwen35", n_mtp=1), None),
        "dflash": (folder / "main.gguf", write_tiny_block_head(folder / "dflash.gguf", window=8)),
        "dspark": (
            folder / "main.gguf",
            write_tiny_block_head(folder / "dspark.gguf", "dspark", n_draft_vocab=400),
        ),
        "dflash2": (
            folder / "main.gguf",
            write_tiny_block_head(folder / "dflash2.gguf", "dflash2", n_draft_vocab=400, window=8),
        ),
        "chained": (write_tiny_mtp(folder / "chained.gguf", "step35", n_mtp=3, predictable=True), None),
        "assistant": (
            write_tiny_gemma(folder / "gemma.gguf"),
            write_tiny_assistant(folder / "assistant.gguf"),
        ),
    }


def command(program, kind, main, head, prompt):
    names = {"eagle": "eagle3", "chained": "mtp", "assistant": "mtp", "dflash2": "dflash"}
    kind = f"draft-{names.get(kind, kind)}"
    options = f"-c 256 -t 1 -n {N_OUTPUT} --temp 0 -ctk f32 -ctv f32 -fa off --spec-type {kind}"
    options += f" --spec-draft-n-max {N_DRAFT} --spec-draft-p-min 0 -ctkd f32 -ctvd f32 -v"
    return [program, "-m", str(main), *(["-md", str(head)] if head else []), "-p", prompt, *options.split()]


def drafts(log):
    """Of each draft, how many tokens were generated before it, and its tokens."""
    found, n_generated = [], 0
    for position, token, n_accepted in _EVENT.findall(log):
        if n_accepted:
            n_generated += int(n_accepted) + 1
            continue
        if position == "0":
            found.append((n_generated, []))
        found[-1][1].append(int(token))
    return found


def verified_drafts(log):
    """As `drafts`, from the calls that verify them: logits are wanted for all of their tokens."""
    found, n_generated = [], 0
    for part in log.split(_CALL)[1:]:
        call, _, _ = part.partition(_NEXT_CALL)
        tokens = _TOKEN.findall(call)
        if len(tokens) > 1 and all(wants_logits == "1" for _, wants_logits in tokens):
            found.append((n_generated, [int(token) for token, _ in tokens[1:]]))
        n_generated += sum(int(n) + 1 for _, _, n in _EVENT.findall(call) if n)
    return found


def record(program, kinds):
    known = json.loads(DATA.read_text()) if kinds else []
    recorded = [each for each in known if each["head"] not in kinds]
    with tempfile.TemporaryDirectory() as folder:
        for kind, (main, head) in write_models(Path(folder)).items():
            if kinds and kind not in kinds:
                continue
            for prompt in PROMPTS:
                run = subprocess.run(
                    command(program, kind, main, head, prompt),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"LLAMA_BATCH_DEBUG": "1"},
                )
                log = run.stdout.decode("utf-8", "replace")
                if run.returncode:
                    sys.exit(log[-2000:])
                found = verified_drafts(log) if kind == "dflash2" else drafts(log)
                recorded.append({"head": kind, "prompt": prompt, "drafts": found})
    return recorded


if __name__ == "__main__":
    DATA.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(each) for each in record(sys.argv[1], sys.argv[2:]))
    DATA.write_text(f"[\n{lines}\n]\n")
