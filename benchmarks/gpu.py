"""Measure a pair of models on each device of this machine, and print a report to send in.

    python benchmarks/gpu.py MAIN.gguf DRAFT.gguf [--rounds 3] [--n 64] [--prompts 3]

The report is one block of Markdown for docs/gpu.md: the costs of calls on each GPU, and on the CPU with and
without this project's kernels; the devices that `--device auto` chooses; and the speed of
some answers, with both models on each device, and with one on each. For llama.cpp's own speed beside it, see
rivals.py.

The devices are measured one after another, so that the memory holds each model once: close other programs,
and let a laptop that has no fan cool down before. The costs are stored as those of `specdec tune` are.
"""

import argparse
import platform
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil
from common import note, parser, table

import spec_local
from spec_local import GenerationSettings, SamplingSettings, Session, kernels
from spec_local.bench import prompts, runner
from spec_local.bench.figures import summarise
from spec_local.bench.record import processor
from spec_local.bench.runner import Outcome
from spec_local.bench.variants import PLAIN, variants
from spec_local.calibration.placement import DeviceCosts, choose
from spec_local.calibration.tuning import Measurement, tune
from spec_local.core.proposal import MAX_DRAFT
from spec_local.llama import runtime
from spec_local.llama.devices import CPU, candidates, gpus
from spec_local.llama.model import Model
from spec_local.llama.setup.probe import check_model_files
from spec_local.system.files import format_size
from spec_local.system.machine import OtherPrograms, binding_version, default_threads, used_by_others

_SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16)  # tokens a call; many kernels of GPUs are for up to 8


class Place(NamedTuple):
    """A device, and whether its CPU kernels are ours; they do not compute on a GPU."""

    device: str
    kernels: kernels.Mode

    def cells(self) -> list[str]:
        name = {"auto": "specdec", "off": "llama.cpp"}[self.kernels]
        return ["CPU", name] if self.device == CPU else [self.device, "–"]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("main", type=Path, help="GGUF file of the main model")
    arguments.add_argument("draft", type=Path, help="GGUF file of the draft model")
    arguments.add_argument("--rounds", type=int, default=3, help="calls of each size")
    arguments.add_argument("--n", type=int, default=64, help="maximum number of tokens in an answer")
    arguments.add_argument("--prompts", type=int, default=3, help="answers, each to a prompt of a category")
    arguments.add_argument("--ctx", type=int, default=2048, help="context length")
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()

    programs = OtherPrograms()
    usual = kernels.mode()
    places = places_here()
    costs = {place: costs_at(place, options) for place in places}
    outcomes = {
        tuple(place.cells()): answers(place.device, place.device, place.kernels, options) for place in places
    }
    known = {}
    for place, (of_main, of_draft) in costs.items():
        known.setdefault(place.device, DeviceCosts(of_main.costs, of_draft.costs))
    choice = choose(known)
    usual_on_cpu = next(place for place in places if place.device == CPU)
    for each in choice.drafting:
        if each.main != each.draft:
            found = answers(each.main, each.draft, usual_on_cpu.kernels, options)
            outcomes[str(each), usual_on_cpu.cells()[1]] = found
    kernels.use(usual)
    note("")
    print_machine(options)
    for i, path in enumerate((options.main, options.draft)):
        print_costs(path, {place: both[i] for place, both in costs.items()})
    print("### Devices\n")
    alone = "There is no GPU here: only the CPU was measured."
    print(" ".join(choice.sentences()) if len(known) > 1 else alone, end="\n\n")
    print_answers(outcomes, options)
    print(f"Meanwhile, {used_by_others(programs.cores())}.")


def places_here() -> list[Place]:
    """What can be measured on this machine, with our kernels first: those that are off at first stay off."""
    modes: tuple[kernels.Mode, ...] = kernels.MODES if kernels.status().instruction_set else ("off",)
    on_gpus = [Place(name, modes[0]) for name in candidates() if name != CPU]
    return [*on_gpus, *(Place(CPU, mode) for mode in modes)]


def costs_at(place: Place, options: argparse.Namespace) -> tuple[Measurement, Measurement]:
    """The costs of the main model's and of the draft model's calls, as `specdec tune` measures them."""
    kernels.use(place.kernels)
    offload, found = candidates()[place.device], []
    for path, n_logits in ((options.main, MAX_DRAFT + 1), (options.draft, 1)):
        note(f"{', '.join(place.cells())}: calls of {path.name}")
        check_model_files(path, offload=offload)
        with closing(Model(path, offload=offload)) as model:
            n_ctx, threads = model.n_ctx(options.ctx), [options.threads]
            found += tune(model, threads, n_ctx=n_ctx, max_logits=n_logits, rounds=options.rounds)
    return found[0], found[1]


def answers(main: str, draft: str, mode: kernels.Mode, options: argparse.Namespace) -> list[Outcome]:
    """Answers to some prompts, plain and with drafts in turns, as `specdec bench` measures them."""
    kernels.use(mode)
    settings = GenerationSettings(SamplingSettings(temperature=0), max_tokens=options.n, seed=0)
    chosen = prompts.select(prompts.load(), [], 1)[: options.prompts]
    with Session.open(
        options.main,
        options.draft,
        n_ctx=options.ctx,
        threads=options.threads,
        device=main,
        draft_device=draft,
        prompt_cache="off",
    ) as session:
        questions = runner.tokenize(session.main.model, chosen)
        found = []
        for event in runner.measure(session, questions, variants(settings, {})):
            if isinstance(event, Outcome):
                note(f"main on {main}, draft on {draft}, kernels {mode}: {event.prompt}")
                found.append(event)
        return found


def print_machine(options: argparse.Namespace) -> None:
    print(f"## {processor()}\n")
    memory = format_size(psutil.virtual_memory().total)
    print(f"- {platform.platform()}, {psutil.cpu_count(logical=False)} cores, {memory} of memory")
    print(f"- specdec {spec_local.__version__}, llama-cpp-python {binding_version()}")
    for gpu in gpus():
        print(f"- {gpu.name}: {gpu.description}, {format_size(gpu.total)}")
    print(f"- llama.cpp: {' '.join(runtime.features())}")
    print(f"- CPU kernels: {kernels.status()}; {options.threads} threads, context of {options.ctx} tokens\n")


def print_costs(path: Path, costs: Mapping[Place, Measurement]) -> None:
    """Print the times of calls, and how they relate to that of one token."""
    with closing(Model(path, weights=False)) as model:
        print(f"### {path.name} ({model.description}, {format_size(model.size)})\n")
    milliseconds, multiples = [], []
    for place, found in costs.items():
        one = found.costs.seconds(1)
        times = [found.costs.seconds(n) for n in _SIZES]
        milliseconds.append([*place.cells(), *(f"{1e3 * seconds:.1f}" for seconds in times)])
        ratios = [f"{seconds / one:.2f}" for seconds in times[1:]]
        multiples.append([*place.cells(), *ratios, f"{found.prefill:.0f}"])
    table(["device", "kernels", *(f"T({n}), ms" for n in _SIZES)], milliseconds)
    table(["device", "kernels", *(f"T({n}) / T(1)" for n in _SIZES[1:]), "prompts, tokens/s"], multiples)


def print_answers(outcomes: Mapping[tuple[str, ...], list[Outcome]], options: argparse.Namespace) -> None:
    rows = []
    for place, found in outcomes.items():
        names = [name for name in found[0].runs if name != PLAIN]
        plain, drafts = summarise(found, PLAIN), summarise(found, names[0])
        speeds = [f"{each.tokens_per_second:.1f}" for each in (plain, drafts)]
        rows.append([*place, *speeds, f"{drafts.speedup.value:.2f}", f"{drafts.tokens_per_step:.2f}"])
    print(f"### Answers to {options.prompts} prompts, up to {options.n} tokens each, temperature 0\n")
    print("Speeds are medians over the prompts, and the speed-up is the geometric mean.\n")
    head = ["plain, tokens/s", "with drafts, tokens/s", "times as fast", "tokens per step"]
    table(["device", "kernels", *head], rows)


if __name__ == "__main__":
    main()
