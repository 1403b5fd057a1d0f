"""Which tokens followed a context before: a suffix tree of bounded depth with counts (SuffixDecoding, 2411.04975)."""

from array import array
from collections.abc import Iterable

ROOT = 0


class SuffixTree:
    """Every run of up to `depth` tokens that was added, with its count. `size` counts the tokens added.

    A node is a number. The tree is a handful of flat arrays and one dictionary of numbers: a hundred thousand objects
    would be walked by every full garbage collection, in the midst of an answer.
    """

    def __init__(self, depth: int = 8) -> None:
        self.depth, self.size = depth, 0
        self.counts = array("q", [0])
        self._tokens = array("q", [-1])
        self._best = array("q", [ROOT])
        self._children: dict[int, int] = {}

    def add(self, tokens: Iterable[int]) -> None:
        """Add a whole sequence."""
        Sequence(self).extend(tokens)

    def child(self, node: int, token: int) -> int:
        """The node of the run that goes on with `token`, ROOT where it never did."""
        return self._children.get(node << 32 | token, ROOT)

    def best(self, node: int) -> int:
        """The most frequent run one token longer, the first seen of equal ones; ROOT where none is known."""
        return self._best[node]

    def grow(self, node: int, token: int) -> int:
        """Count one more occurrence of the run that goes on with `token`, and give its node."""
        counts, best = self.counts, self._best
        child = self._children.setdefault(node << 32 | token, len(counts))
        if child == len(counts):
            counts.append(0)
            best.append(ROOT)
            self._tokens.append(token)
        counts[child] += 1
        if best[node] == ROOT or counts[child] > counts[best[node]]:
            best[node] = child
        return child

    def follow(self, node: int, window: int) -> tuple[list[int], list[float]]:
        """The likeliest continuation below `node`, at most `window` tokens, and each one's share of the continuations.

        The share of n among m occurrences is n / (m + 1): one occurrence alone says little.
        """
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < window and (best := self._best[node]) != ROOT:
            tokens.append(self._tokens[best])
            shares.append(self.counts[best] / (self.counts[node] + 1))
            node = best
        return tokens, shares


class _Ends:
    """The nodes of a text's ends, the longest first."""

    def __init__(self, tree: SuffixTree) -> None:
        self.tree = tree
        self._ends: list[int] = []

    def matches(self, most: int) -> list[tuple[int, int]]:
        """(length, node) of up to `most` ends of the text that went on, the longest first.

        Every shorter end of a known one is known, so that their number gives the lengths.
        """
        longest = len(self._ends)
        found = [(longest - index, node) for index, node in enumerate(self._ends) if self.tree.best(node) != ROOT]
        return found[:most]


class Sequence(_Ends):
    """A sequence that grows in a tree; its ends up to now, but for the last token's own, are what occurred before."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens, and every run that ends with one of them."""
        tree = self.tree
        for token in tokens:
            self._ends = [tree.grow(node, token) for node in [*self._ends, ROOT][-tree.depth :]]
            tree.size += 1


class Cursor(_Ends):
    """Follows a text through a tree that it is no part of."""

    def __init__(self, tree: SuffixTree, context: Iterable[int] = ()) -> None:
        super().__init__(tree)
        self.extend(context)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        tree = self.tree
        for token in tokens:
            nodes = [*self._ends, ROOT][-tree.depth :]
            self._ends = [child for node in nodes if (child := tree.child(node, token)) != ROOT]
