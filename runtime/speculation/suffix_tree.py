"""Which tokens followed a context before: a suffix tree of bounded depth with counts (SuffixDecoding, 2411.04975)."""

from collections.abc import Iterable


class Node:
    """How often a run of tokens occurred, and the nodes of the runs that are one token longer."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


class SuffixTree:
    """Every run of up to `depth` tokens that was added, with its count. `size` counts the tokens added."""

    def __init__(self, depth: int = 16) -> None:
        self.depth, self.size = depth, 0
        self._root = Node()

    def sequence(self) -> "Sequence":
        """A new sequence that tokens are added to one by one."""
        return Sequence(self)

    def matches(self, context: list[int]) -> list[tuple[int, Node]]:
        """(length, node) of every end of `context` that occurred, the longest first."""
        found = []
        for length in range(min(len(context), self.depth - 1), 0, -1):
            node = self._root
            for token in context[-length:]:
                child = node.children.get(token)
                if child is None:
                    break
                node = child
            else:
                found.append((length, node))
        return found

    def follow(self, node: Node, window: int) -> tuple[list[int], list[float]]:
        """The likeliest continuation below `node`, at most `window` tokens, and each one's share of the continuations.

        Of equally frequent tokens the one seen first is taken. The share of n among m occurrences is n / (m + 1): one
        occurrence alone says little.
        """
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < window and node.children:
            seen = node.count
            token, node = max(node.children.items(), key=_count)
            tokens.append(token)
            shares.append(node.count / (seen + 1))
        return tokens, shares


class Sequence:
    """One sequence in a tree; `tail` holds its last tokens."""

    def __init__(self, tree: SuffixTree) -> None:
        self._tree = tree
        self._open: list[Node] = []
        self.tail: list[int] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the tree, and every run that ends with one of them."""
        tree, depth = self._tree, self._tree.depth
        for token in tokens:
            self._open.append(tree._root)
            if len(self._open) > depth:
                del self._open[0]
            for index, node in enumerate(self._open):
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = Node()
                child.count += 1
                self._open[index] = child
            tree.size += 1
            self.tail.append(token)
            if len(self.tail) > depth:
                del self.tail[0]

    def matches(self) -> list[tuple[int, Node]]:
        """(length, node) of every end of this sequence that occurred before, the longest first."""
        lengths = range(len(self._open), 0, -1)
        return [(length, node) for length, node in zip(lengths, self._open, strict=True) if node.children]


def _count(item: tuple[int, Node]) -> int:
    return item[1].count
