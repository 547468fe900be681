"""Verifiers are lossless: exact enumeration of drawing a chain or a tree and of verifying it."""

import itertools
import math
from collections import defaultdict
from functools import partial

import numpy as np
import pytest

from spec_local.core.proposal import ROOT, Proposal
from spec_local.core.sampling import Distribution
from spec_local.testing import enumerate_outcomes
from spec_local.verifiers import VERIFIERS
from spec_local.verifiers.base import residual
from spec_local.verifiers.tree import ratio, tree_verifier, without

TREE_RULES = [name for name, verifier in VERIFIERS.items() if verifier.drawing != "one"]
DRAWN_RULES = [name for name in TREE_RULES if VERIFIERS[name].drawing != "chosen"]
DRAWINGS = ["one", "with replacement", "without replacement"]
KINDS = ["dense", "zeros", "one-hot", "equal", "nearly equal", "disjoint", "sharp", "uniform draft", "mixed"]


pytestmark = pytest.mark.usefixtures("cached_rho")


def distribution_pair(generator, kind, v):
    """p and q, float64 (v,)."""
    if kind == "mixed":
        kind = generator.choice(KINDS[:-1])
    p, q = generator.dirichlet(np.full(v, 0.5), size=2)
    if kind == "zeros":
        mask = generator.random((2, v)) < 0.5
        mask[[0, 1], generator.integers(v, size=2)] = True
        p, q = p * mask[0] + 1e-3 * mask[0], q * mask[1] + 1e-3 * mask[1]
    if kind == "one-hot":
        p, q = (np.eye(v)[generator.integers(v)] if generator.random() < 0.5 else row for row in (p, q))
    if kind == "equal":
        q = p
    if kind == "nearly equal":
        q = p * (1 + 1e-15 * generator.normal(size=v))
    if kind == "disjoint":
        half = generator.permutation(v) < v / 2
        p, q = (p + 1e-3) * half, (q + 1e-3) * ~half
    if kind == "sharp":  # nearly all on one token
        p, q = p**9, q**9
    if kind == "uniform draft":  # ties
        q = np.ones(v)
    return p / p.sum(), q / q.sum()


class Language:
    """A table of the distributions after each path: p of the main model, q of the draft model."""

    def __init__(self, seed, kind, v, depth):
        generator = np.random.default_rng([seed, v, depth])
        self.v, self.depth = v, depth
        self.pairs = {
            path: distribution_pair(generator, kind, v)
            for d in range(depth + 1)
            for path in itertools.product(range(v), repeat=d)
        }

    def p(self, path):
        return self.pairs[tuple(path)][0]

    def q(self, path):
        return self.pairs[tuple(path)][1]

    def probability(self, tokens):
        return math.prod(self.p(tokens[:i])[t] for i, t in enumerate(tokens))


def as_distribution(probs):
    """Sparse if there are zeros, so that verifiers get both forms."""
    ids = probs.nonzero()[0]
    return Distribution(None, probs) if len(ids) == len(probs) else Distribution(ids, probs[ids])


def fixed(shape):
    """A shape by slots: shape[(0, 1)] is the number of children of the second child of the first."""
    return lambda slots, path, drawn: sum(shape.get(slot, 0) for slot in slots)


CHAIN = fixed({(): 1, (0,): 1})
SHAPES = {
    "two": fixed({(): 2}),
    "three": fixed({(): 3}),
    "chain": CHAIN,
    "two by two": fixed({(): 2, (0,): 2, (1,): 2}),
    "one then two": fixed({(): 1, (0,): 2}),
    "lopsided": fixed({(): 2, (0,): 2, (1,): 1}),
    "late": fixed({(): 2, (1,): 2}),
}
OWN_PATH = {
    "some paths stop": lambda slots, path, drawn: (2, 2, 0)[path[0]] if path else 2,
    "each path its own width": lambda slots, path, drawn: path[0] if path else 2,
}
OTHER_BRANCHES = {  # depends on the tokens of all nodes drawn so far
    "sum of other tokens": lambda slots, path, drawn: (sum(drawn) + len(path)) % 3 if path else 2,
    "none after token 2": lambda slots, path, drawn: 0 if max(drawn[0:2], default=0) == 2 else 2,
}


def draw(language, drawing, shape, rng):
    """Draw a tree by levels; shape(slots, path, tokens drawn so far) is the number of children."""
    tokens, parents, draws, distributions, slots = [], [], [], {}, {ROOT: [()]}
    level = [ROOT]
    paths = {ROOT: ()}
    for _ in range(language.depth):
        drawn, below = tuple(tokens), []
        for parent in level:
            path = paths[parent]
            q = as_distribution(language.q(path))
            n = min(shape(slots[parent], path, drawn), np.count_nonzero(language.q(path)))
            if not n:
                continue
            distributions[parent] = q
            by_token = {}
            for i, token in enumerate(children_of(q, n, drawing, rng)):
                if token not in by_token:
                    by_token[token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    paths[by_token[token]] = (*path, token)
                    below.append(by_token[token])
                child = by_token[token]
                draws.append(child)
                slots[child] = slots.get(child, []) + [(*slot, i) for slot in slots[parent]]
        level = below
    return Proposal(tokens, parents, drawing, distributions, draws)


def children_of(q, n, drawing, rng):
    if drawing == "chosen":
        return q.top(n)[0].tolist()
    if drawing == "one":
        return [q.draw(rng)]
    if drawing == "with replacement":
        return [q.draw(rng) for _ in range(n)]
    drawn = []
    for _ in range(n):
        drawn.append(q.without(drawn).draw(rng))
    return drawn


def verdicts(rule, language, drawing, shape, grow=draw):
    """The exact probability of each verdict: number of accepted draft tokens, and output.

    rule: a verifier, or its name.
    """
    trees, verifier = {}, VERIFIERS[rule] if isinstance(rule, str) else rule

    def draw_tree(rng):
        tree = grow(language, drawing, shape, rng)
        key = tuple(map(tuple, (tree.tokens, tree.parents, tree.draws)))
        trees[key] = tree
        return key

    def verify(tree, rng):
        path, token = verifier(tree, p_by_node.__getitem__, language.v, rng)
        assert [tree.parents[n] for n in path] == [ROOT, *path[:-1]][: len(path)]
        return len(path), (*(tree.tokens[n] for n in path), token)

    outcomes = defaultdict(float)
    for key, p_tree in enumerate_outcomes(draw_tree).items():
        tree = trees[key]
        p_by_node = {
            node: as_distribution(language.p([tree.tokens[n] for n in tree.path(node)]))
            for node in range(ROOT, len(tree.tokens))
        }
        for verdict, p_verdict in enumerate_outcomes(partial(verify, tree)).items():
            outcomes[verdict] += p_tree * p_verdict
    return outcomes


def loss(language, outcomes):
    """The largest error in the joint distribution of the output, continued by draws from p."""
    n = language.depth + 1
    output = dict.fromkeys(itertools.product(range(language.v), repeat=n), 0.0)
    for (_, start), probability in outcomes.items():
        for rest in itertools.product(range(language.v), repeat=n - len(start)):
            tokens = start + rest
            after = math.prod(language.p(tokens[:i])[tokens[i]] for i in range(len(start), n))
            output[tokens] += probability * after
    return max(abs(output[tokens] - language.probability(tokens)) for tokens in output)


def mean_accepted(outcomes):
    return sum(n * probability for (n, _), probability in outcomes.items())


ALL_SHAPES = SHAPES | OWN_PATH | OTHER_BRANCHES


def is_case(rule, kind, name):
    if kind not in ("dense", "zeros", "mixed"):  # the others concern the arithmetic of one node
        return name in ("two", "three", "lopsided")
    return name not in OTHER_BRANCHES or rule != "traversal"


@pytest.mark.parametrize(
    ("rule", "kind", "name"),
    [case for case in itertools.product(TREE_RULES, KINDS, ALL_SHAPES) if is_case(*case)],
)
def test_output_has_exactly_the_main_distribution(rule, kind, name):
    v = 2 if name in ("two by two", "lopsided") else 3
    language = Language([*ALL_SHAPES].index(name), kind, v, depth=1 if name in ("two", "three") else 2)
    assert loss(language, verdicts(rule, language, VERIFIERS[rule].drawing, ALL_SHAPES[name])) < 1e-12


MORE_SHAPES = {
    "six tokens": (6, 1, {(): 2}),
    "three of four": (4, 1, {(): 3}),
    "two, below the second one": (4, 2, {(): 2, (1,): 1}),
    "two at the ends": (2, 3, {(): 2, (0,): 1, (0, 0): 2}),
    "two in the middle": (2, 3, {(): 1, (0,): 2, (0, 0): 1, (0, 1): 1}),
}


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("kind", ["dense", "mixed"])
@pytest.mark.parametrize("name", MORE_SHAPES)
def test_output_is_exact_for_more_tokens_and_deeper_trees(rule, kind, name):
    v, depth, shape = MORE_SHAPES[name]
    language = Language([*MORE_SHAPES].index(name), kind, v, depth)
    assert loss(language, verdicts(rule, language, VERIFIERS[rule].drawing, fixed(shape))) < 1e-12


def chain_of(depth):
    return fixed({(0,) * d: 1 for d in range(depth)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", VERIFIERS)
def test_every_verifier_is_lossless_for_a_drawn_chain(rule, kind):
    for seed, (v, depth) in enumerate([(3, 2), (2, 3), (6, 1), (3, 0)]):
        language = Language(seed, kind, v, depth)
        assert loss(language, verdicts(rule, language, "one", chain_of(depth))) < 1e-12


@pytest.mark.parametrize("rule", VERIFIERS)
def test_every_verifier_accepts_chosen_tokens_by_exact_match(rule):
    language = Language(0, "dense", 3, 2)
    chosen = verdicts(rule, language, "chosen", SHAPES["lopsided"])
    assert loss(language, chosen) < 1e-12
    assert chosen == verdicts("exact-match", language, "chosen", SHAPES["lopsided"])


@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("name", SHAPES | OTHER_BRANCHES)
def test_exact_match_is_lossless_for_nodes_of_any_origin(drawing, name):
    language = Language(4, "mixed", 2 if name == "two by two" else 3, 2)
    assert loss(language, verdicts("exact-match", language, drawing, ALL_SHAPES[name])) < 1e-12


@pytest.mark.parametrize("rule", VERIFIERS)
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_verifier_rejects_nodes_drawn_for_another(rule, drawing):
    fits = VERIFIERS[rule].drawing in ("chosen", drawing) or drawing == "one"
    proposal = Proposal([1], [ROOT], drawing, {ROOT: Distribution(None, np.array([0.5, 0.5]))})

    def verify():
        enumerate_outcomes(
            lambda rng: VERIFIERS[rule](proposal, lambda node: proposal.distributions[ROOT], 2, rng)[1]
        )

    if fits:
        verify()
    else:
        with pytest.raises(ValueError, match="another verifier"):
            verify()


@pytest.mark.parametrize("rule", [r for r in VERIFIERS if r != "exact-match"])
def test_a_draft_token_with_q_0_is_an_error(rule):
    q = Distribution(None, np.array([0.5, 0.5, 0.0]))
    proposal = Proposal([2], [ROOT], "one", {ROOT: q})
    main = Distribution(None, np.full(3, 1 / 3))
    with pytest.raises(ValueError, match="probability 0"):
        enumerate_outcomes(lambda rng: VERIFIERS[rule](proposal, lambda node: main, 3, rng)[1])


def mislabelled(drawing):
    """A tree that was not drawn in the way it states."""

    def grow(language, declared, shape, rng):
        tree = draw(language, drawing, shape, rng)
        return Proposal(tree.tokens, tree.parents, declared, tree.distributions, tree.draws)

    return grow


@pytest.mark.parametrize("rule", DRAWN_RULES)
@pytest.mark.parametrize("drawing", DRAWINGS[1:])
def test_the_enumeration_detects_a_wrong_drawing(rule, drawing):
    """This shows that the enumeration can fail, and that the check of the drawing is needed."""
    language, declared = Language(0, "dense", 4, 1), VERIFIERS[rule].drawing
    if drawing == "with replacement" and declared != drawing:
        with pytest.raises(ValueError, match="probability 0"):  # a token drawn twice
            verdicts(rule, language, declared, SHAPES["two"], mislabelled(drawing))
        return
    worst = loss(language, verdicts(rule, language, declared, SHAPES["two"], mislabelled(drawing)))
    assert worst < 1e-12 if drawing == declared else worst > 1e-3


def one_by_one(seed, n):
    """n draws, one at a time; the parent of the next one depends on all tokens drawn so far."""

    def grow(language, drawing, shape, rng):
        tokens, parents, distributions, draws, paths = [], [], {}, [], {ROOT: ()}
        for _ in range(n):
            room = [
                m
                for m, path in paths.items()
                if len(path) < language.depth and parents.count(m) < np.count_nonzero(language.q(path))
            ]
            if not room:
                break
            parent = int(np.random.default_rng([seed, len(draws), *tokens]).choice(room))
            siblings = [tokens[m] for m in range(len(tokens)) if parents[m] == parent]
            q = distributions[parent] = as_distribution(language.q(paths[parent]))
            token = q.without(siblings).draw(rng)
            draws.append(len(tokens))
            paths[len(tokens)] = (*paths[parent], token)
            tokens.append(token)
            parents.append(parent)
        return Proposal(tokens, parents, drawing, distributions, draws)

    return grow


def test_a_tree_may_depend_on_earlier_draws():
    """Except under SpecTr, which needs the number of children in advance."""
    for seed, (v, depth, kind) in enumerate(itertools.product((2, 3), (2, 3), ("dense", "zeros", "equal"))):
        if v**depth < 27:
            language = Language(seed, kind, v, depth)
            drawing = VERIFIERS["traversal"].drawing
            outcomes = verdicts("traversal", language, drawing, None, one_by_one(seed, 4))
            assert loss(language, outcomes) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_on_chains_traversal_equals_block_which_accepts_at_least_as_many_tokens_as_token(kind):
    for seed, (v, depth) in enumerate([(2, 1), (3, 2), (2, 3)]):
        language = Language(seed, kind, v, depth)
        traversal, block, token = (
            verdicts(rule, language, "one", chain_of(depth)) for rule in ("traversal", "block", "token")
        )
        for verdict in traversal.keys() | block.keys():
            assert traversal.get(verdict, 0.0) == pytest.approx(block.get(verdict, 0.0), abs=1e-12)
        assert mean_accepted(block) >= mean_accepted(token) - 1e-12


def test_the_example_of_the_block_verification_paper():
    """p = (1/3, 2/3), q = (2/3, 1/3), k = 2: 11/9 accepted against 10/9 (Sun et al., section 3)."""
    language = Language(0, "dense", 2, 2)
    language.pairs = dict.fromkeys(language.pairs, (np.array([1, 2]) / 3, np.array([2, 1]) / 3))
    for rule, expected in [("token", 10 / 9), ("block", 11 / 9)]:
        found = mean_accepted(verdicts(rule, language, "one", CHAIN))
        assert found == pytest.approx(expected, abs=1e-12)


def recursive_rejection(p, q, drawn, rng):
    """Sequoia's rule for children without replacement (Chen et al. 2024, arXiv 2402.12374, algorithm 2)."""
    for token in drawn:
        if rng.accept(ratio(p, q, token)):
            return token
        p = residual(p, q)
        p /= p.sum()
        q = without(q, token)
    return rng.choose(p)


@pytest.mark.parametrize("kind", ["dense", "zeros", "sharp", "mixed"])
@pytest.mark.parametrize("name", ["two", "three", "one then two", "lopsided", "late"])
def test_traversal_accepts_at_least_as_many_tokens_as_recursive_rejection(kind, name):
    reference = tree_verifier("without replacement", recursive_rejection)
    language = Language([*SHAPES].index(name), kind, 3, 2)
    traversal, recursive = (
        verdicts(verifier, language, "without replacement", SHAPES[name])
        for verifier in (VERIFIERS["traversal"], reference)
    )
    assert loss(language, recursive) < 1e-12
    traversal, recursive = mean_accepted(traversal), mean_accepted(recursive)
    assert traversal >= recursive - 1e-12
    if name in ("two", "three"):  # equal for a single node
        assert traversal == pytest.approx(recursive, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [*DRAWN_RULES, "token", "block"])
def test_one_drawn_child_is_accepted_with_one_minus_total_variation(rule, kind):
    language = Language(0, kind, 5, 1)
    expected = np.minimum(language.p(()), language.q(())).sum()
    found = mean_accepted(verdicts(rule, language, "one", fixed({(): 1})))
    assert found == pytest.approx(expected, abs=1e-12)
