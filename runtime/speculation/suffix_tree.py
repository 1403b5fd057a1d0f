"""Which tokens followed a context before: a suffix tree of bounded depth with counts (SuffixDecoding, 2411.04975)."""

from collections.abc import Iterable


class Node:
    """How often a run of tokens occurred, the runs that are one token longer, and the most frequent of them."""

    __slots__ = ("best", "best_token", "children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}
        self.best: Node | None = None
        self.best_token = -1

    def grow(self, token: int) -> "Node":
        """Count one more occurrence of the run that goes on with `token`."""
        child = self.children.get(token)
        if child is None:
            child = self.children[token] = Node()
        child.count += 1
        if self.best is None or child.count > self.best.count:
            self.best, self.best_token = child, token
        return child


class SuffixTree:
    """Every run of up to `depth` tokens that was added, with its count. `size` counts the tokens added."""

    def __init__(self, depth: int = 8) -> None:
        self.depth, self.size = depth, 0
        self.root = Node()

    def add(self, tokens: Iterable[int]) -> None:
        """Add a whole sequence."""
        Sequence(self).extend(tokens)


class Sequence:
    """A sequence that grows in a tree; its ends up to now, but for the last token's own, are what occurred before."""

    def __init__(self, tree: SuffixTree) -> None:
        self._tree = tree
        self._ends: list[Node] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens, and every run that ends with one of them."""
        tree = self._tree
        for token in tokens:
            ends = [*self._ends, tree.root][-tree.depth :]
            self._ends = [node.grow(token) for node in ends]
            tree.size += 1

    def matches(self, most: int) -> list[tuple[int, Node]]:
        """(length, node) of up to `most` ends of the sequence that went on elsewhere, the longest first."""
        return _going_on(self._ends, most)


class Cursor:
    """Follows a text through a tree that it is no part of."""

    def __init__(self, tree: SuffixTree, context: Iterable[int] = ()) -> None:
        self.tree = tree
        self._ends: list[Node] = []
        self.extend(context)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        for token in tokens:
            ends = [*self._ends, self.tree.root][-self.tree.depth :]
            self._ends = [child for node in ends if (child := node.children.get(token)) is not None]

    def matches(self, most: int) -> list[tuple[int, Node]]:
        """(length, node) of up to `most` ends of the text that the tree knows and that went on, the longest first."""
        return _going_on(self._ends, most)


def follow(node: Node, window: int) -> tuple[list[int], list[float]]:
    """The likeliest continuation below `node`, at most `window` tokens, and each one's share of the continuations.

    Of equally frequent tokens the one seen first is taken. The share of n among m occurrences is n / (m + 1): one
    occurrence alone says little.
    """
    tokens: list[int] = []
    shares: list[float] = []
    while len(tokens) < window and node.best is not None:
        tokens.append(node.best_token)
        shares.append(node.best.count / (node.count + 1))
        node = node.best
    return tokens, shares


def _going_on(ends: list[Node], most: int) -> list[tuple[int, Node]]:
    """The ends of a text by length; every shorter end of a known one is known, so their count gives the lengths."""
    found = [(len(ends) - index, node) for index, node in enumerate(ends) if node.children]
    return found[:most]
