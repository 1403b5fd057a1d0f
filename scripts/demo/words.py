"""Random values that documents and charts are filled with."""

from random import Random


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words(
    "ADA ANNA BEN CARL CLARA DAVID EMMA ERIK EVA FRED GRACE HANNA HUGO IDA IVAN JACK JANE KARL KATE LARS LEO "
    "LISA LUCY MARK MAX MIA NINA NOAH OLGA OSCAR PAUL PETER ROSA RUTH SAM SARA TOM VERA WILL ZOE "
)
LAST = _words(
    "ADAMS BAKER BERG BROWN CLARK COHEN DAVIS EVANS FIELD FORD GRANT GREEN HALL HILL HUNT JONES KELLY KING "
    "KLEIN LANE LEWIS LOPEZ MASON MEYER MILLS MOORE NOVAK PARK PRICE QUINN REED ROSSI SILVA SMITH STONE TURNER "
    "VOGEL WARD WEBER YOUNG "
)
CITIES = _words(
    "ATHENS BERLIN BERN BOSTON CAIRO CORK DELHI DUBLIN GENEVA HAVANA KYIV LIMA LISBON LONDON LYON MADRID MILAN "
    "NANTES OSLO OXFORD PARIS PRAGUE QUITO RIGA ROME SEOUL SOFIA TOKYO TURIN VIENNA WARSAW ZURICH "
)
GOODS = _words(
    "APPLES BACON BEANS BREAD BUTTER CAKE CARROTS CHEESE COFFEE CREAM CUPS EGGS FISH FLOUR FORKS GRAPES HAM "
    "HONEY JAM JUICE KIWI LAMP LEMONS MILK NUTS OIL ONIONS PASTA PEARS PENS PEPPER PLATES PLUMS RICE SALT SOAP "
    "SOUP SUGAR TEA TOFU TOMATO WATER YEAST "
)
SHOPS = _words("BAKERY BAZAAR BISTRO BOOKS CAFE DELI DINER GARAGE GROCER KIOSK MARKET PHARMACY SHOP STORE TAVERN")
ROLES = _words(
    "ANALYST BAKER CHEF CLERK DOCTOR DRIVER EDITOR ENGINEER GUARD GUEST LAWYER MANAGER NURSE PILOT TEACHER "
    "VISITOR WAITER "
)
TREES = _words("ASH BEECH BIRCH CEDAR CHERRY ELM FIR HAZEL LINDEN MAPLE OAK PALM PINE POPLAR WILLOW")
MONTHS = _words("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC")
TITLES = _words("BUDGET COSTS EXPORTS IMPORTS INCOME ORDERS PROFIT RAINFALL SALES STOCK VISITS VOTES")

_CONSONANTS = "BCDFGHJKLMNPRSTVWZ"
_VOWELS = "AEIOUY"


def invented(rng: Random, longest: int = 7) -> str:
    """A word that no list contains, of 3 to `longest` letters."""
    length = rng.randint(3, longest)
    start = rng.randint(0, 1)
    return "".join(rng.choice(_CONSONANTS if (i + start) % 2 else _VOWELS) for i in range(length))


def name(rng: Random, words: list[str]) -> str:
    """A word out of `words`, or an invented one three times in ten."""
    return invented(rng) if rng.random() < 0.3 else rng.choice(words)


def distinct(rng: Random, words: list[str], count: int) -> list[str]:
    """`count` different words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[name(rng, words)] = None
    return list(found)


def digits(rng: Random, count: int) -> str:
    """`count` digits, the first not 0."""
    return str(rng.randint(10 ** (count - 1), 10**count - 1))


def price(rng: Random, most: int = 99) -> str:
    """An amount below `most` + 1 with two decimals."""
    return f"{rng.randint(0, most)}.{rng.randint(0, 99):02d}"


def date(rng: Random) -> str:
    """A day in one of three notations."""
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(2015, 2029)
    return rng.choice(
        (f"{day:02d}/{month:02d}/{year}", f"{year}-{month:02d}-{day:02d}", f"{day} {MONTHS[month - 1]} {year}")
    )


def time(rng: Random) -> str:
    """A time of the day, such as 07:45."""
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def person(rng: Random) -> str:
    """A first and a last name."""
    return f"{name(rng, FIRST)} {name(rng, LAST)}"


def letters(rng: Random, count: int) -> str:
    """`count` random capital letters."""
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(count))
