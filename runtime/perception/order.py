"""In which order the tiles of an image are encoded ahead."""

from ..processing.prompt import PreparedImage


def encoding_order(image: PreparedImage) -> list[int]:
    """Numbers of its tiles: the one that shows it whole first, then from the centre outwards."""
    rows, columns = image.cut
    grid = [(row, column) for row in range(rows) for column in range(columns)]

    def distance(number: int) -> float:
        row, column = grid[number]
        return abs((row + 0.5) / rows - 0.5) + abs((column + 0.5) / columns - 0.5)

    outwards = sorted(range(len(grid)), key=distance)
    return [*range(len(grid), len(image.tiles)), *outwards]
