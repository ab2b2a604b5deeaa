"""Differences of meaning that sentence models do not see: numbers, negation, opposites, names, code.

Cosine similarity calls opposites similar ("encrypt it" and "decrypt it": 0.82), because they occur in the same places. These
checks know nothing of meaning. They name what differs between two texts and err on the side of objecting.
"""

import re
from collections import Counter
from collections.abc import Iterable

NUMBER = "number"
NEGATION = "negation"
OPPOSITE = "opposite"
NAME = "name"
CODE = "code"

_NUMBER_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion first second third fourth fifth
sixth seventh eighth ninth tenth half quarter dozen once twice thrice double triple single both pair couple
"""
_NEGATIONS = """
not no never none nobody nothing nowhere neither nor cannot without hardly scarcely barely rarely seldom except unless lack lacks
lacking fail fails failed
"""
# What is left of these before an apostrophe.
_CONTRACTIONS = """
isn aren wasn weren don doesn didn won wouldn shan shouldn can couldn mustn mightn hasn haven hadn needn ain daren oughtn
"""
# Words, and behind each those that say the contrary.
_PAIRS = """
true/false yes/no all/some,none,few always/never,sometimes more/less,fewer most/least many/few higher/lower high/low
up/down upper/lower above/below over/under before/after early/late earlier/later left/right top/bottom first/last inside/outside
in/out on/off open/close,closed,shut start/stop,end,finish begin/end,finish enter/exit,leave push/pull buy/sell lend/borrow
give/take send/receive add/remove,subtract,delete create/destroy,delete win/lose pass/fail accept/reject,refuse,decline
allow/deny,forbid,prevent,block,prohibit permit/forbid,prohibit grant/deny,revoke hot/cold warm/cool fast/slow quick/slow
big/small large/small long/short tall/short wide/narrow thick/thin heavy/light strong/weak hard/soft,easy easy/difficult
good/bad,poor better/worse best/worst right/wrong correct/wrong safe/dangerous,unsafe rich/poor cheap/expensive old/new,young
full/empty wet/dry clean/dirty dark/light,bright day/night east/west north/south male/female man/woman boy/girl he/she his/her
him/her father/mother husband/wife son/daughter brother/sister king/queen love/hate like/dislike alive/dead live/die
positive/negative plus/minus gain/loss,lose profit/loss rise/fall,drop raise/lower grow/shrink improve/worsen,degrade
expand/contract,shrink ascend/descend attack/defend guilty/innocent hire/fire lock/unlock read/write encode/decode
public/private internal/external minimum/maximum minimal/maximal min/max optional/required,mandatory can/cannot must/may,might
shall/may should/could,may credit/debit client/server master/slave input/output upload/download even/odd past/future
with/without and/or for/against to/from today/tomorrow,yesterday same/different,other equal/unequal,different
succeed/fail success/failure healthy/sick,ill present/absent arrive/leave,depart remember/forget found/lost find/lose
monday/tuesday,wednesday,thursday,friday,saturday,sunday tuesday/wednesday,thursday,friday,saturday,sunday
wednesday/thursday,friday,saturday,sunday thursday/friday,saturday,sunday friday/saturday,sunday saturday/sunday
increase/reduce,lower,drop,fall,decline,cut decrease/raise,rise,grow boost/reduce,cut,lower grow/decline strengthen/weaken
help/hurt,harm,hinder improve/harm,hurt support/oppose confirm/deny admit/deny approve/deny praise/blame,criticize
include/omit keep/discard,drop save/spend,waste build/destroy,demolish speed/slow accelerate/slow gather/scatter join/leave
expensive/cheap simple/complex,complicated common/rare major/minor temporary/permanent fixed/variable local/global
vertical/horizontal solid/liquid sweet/sour,bitter,salty fresh/stale raw/cooked toxic/harmless calm/nervous happy/sad
brave/afraid deep/shallow sharp/blunt,dull rough/smooth tight/loose front/back near/far parent/child teacher/student
doctor/patient question/answer problem/solution cause/prevent,cure victory/defeat friend/enemy majority/minority
plaintiff/defendant buyer/seller lessor/lessee lender/borrower employer/employee landlord/tenant
"""
# Beginnings that turn a word into its contrary: encrypt/decrypt, increase/decrease, legal/illegal, include/exclude.
_PREFIX_PAIRS = """
en/de en/dis in/de as/de ac/de in/ex im/ex in/out out/under up/down over/under pre/post fore/after maxi/mini macro/micro pro/anti
hyper/hypo inter/intra super/sub pro/con pro/re at/de con/de ap/de
/un /dis /in /im /ir /il /non /mis /anti /de /ab /a /mal /pseudo /ex /counter /under /over /re
"""
_ENDINGS = "ations ation ions ments ion ment ings ing ers ies ed er es ly al s e y"
_SUFFIXES = (("less", "ful"), ("less", ""), ("ful", "less"), ("free", ""), ("proof", ""))
_STEM = 3  # shortest remainder of a word that counts as the same word

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_DIGITS = re.compile(r"[-+±]?[$€£¥]?\d(?:[\d.,:/eE^%°-]*[\d%°])?")
_CODE = re.compile(
    r"\w*[_\\{}\[\]<>=|&*^~`#@$;]\w*|\w+\(|\)|[a-z]+[A-Z]\w*|[A-Za-z]+\d\w*|\w+\.\w+|\w+/\w+|[-+/*%!]=?|://"
)
# A line that is code rather than prose with a name in it.
_CODE_LINE = re.compile(r"[{}\[\]<>=|\\;`]|\w+\(|\w+_\w+|^\s*(?:#|//|\$ |>>>)|->|::")


def objection(draft: str, target: str) -> str:
    """What differs between two continuations of one text that no similarity makes up for; empty where nothing does.

    One of ``NUMBER``, ``NEGATION``, ``OPPOSITE``, ``NAME``, ``CODE``. Texts must start at a word's beginning.
    """
    if draft == target:
        return ""
    if _numbers(draft) != _numbers(target):
        return NUMBER
    ours, theirs = _words(draft), _words(target)
    if _negations(ours) != _negations(theirs):
        return NEGATION
    left, right = Counter(w.lower() for w in ours), Counter(w.lower() for w in theirs)
    if opposites((left - right).keys(), (right - left).keys()):
        return OPPOSITE
    if _names(ours) != _names(theirs):
        return NAME
    if Counter(_CODE.findall(draft)) != Counter(_CODE.findall(target)):
        return CODE
    return ""


def objection_in_text(before: str, draft: str, target: str, after: str) -> str:
    """The same for words in a text they share, of which the target's last one may be the beginning of a longer one.

    What a word could become counts as what it is: ``dec`` against ``increase``, ``isn`` against ``is``. Inside a line of code
    nothing is the same as anything else.
    """
    found = objection(before + draft + after, before + target + after) or objection(draft, target)
    if found or draft == target:
        return found
    if _CODE_LINE.search(before + draft + after):
        return CODE
    ours, theirs = ([word.lower() for word in _words(text)] for text in (draft, target))
    return _could_become(theirs[-1], set(ours) - set(theirs)) if theirs else ""


def _could_become(beginning: str, words: set[str]) -> str:
    """What would be wrong with a longer word of this beginning in place of ``words``; empty where nothing comes to mind."""
    if beginning in _CONTRACTED or any(word.startswith(beginning) for word in _NOTS - words):
        return NEGATION
    if any(word.startswith(beginning) for word in _NUMBERS - words):
        return NUMBER
    for word in words:
        contraries = _CONTRARIES.get(word, frozenset()) | _CONTRARIES.get(_stem(word), frozenset())
        made = {
            other + word.removeprefix(one)
            for one, other in _PREFIXES
            if word.startswith(one)
            and len(word) - len(one) >= _STEM
            and beginning != "a"  # the article, far more likely
        }
        made |= {word.removesuffix(one) + other for one, other in _SUFFIXES if word.endswith(one)}
        if any(contrary.startswith(beginning) and contrary != word for contrary in contraries | made):
            return OPPOSITE
    return ""


def opposites(left: Iterable[str], right: Iterable[str]) -> bool:
    """Whether a lower-case word of one side is the contrary of one of the other."""
    others = list(right)
    return any(_contrary(a, b) or _contrary(b, a) for a in left for b in others)


def _contrary(a: str, b: str) -> bool:
    if _stem(b) in _CONTRARIES.get(_stem(a), ()) or b in _CONTRARIES.get(a, ()):
        return True
    for one, other in _PREFIXES:
        if a.startswith(one) and b.startswith(other) and _same_word(a[len(one) :], b[len(other) :]):
            return True
    for one, other in _SUFFIXES:
        if a.endswith(one) and b.endswith(other):
            rest = a.removesuffix(one)
            if len(rest) >= _STEM and rest == (b.removesuffix(other) if other else b):
                return True
    return False


def _same_word(a: str, b: str) -> bool:
    a, b = _stem(a), _stem(b)
    return len(a) >= _STEM and a == b


def _stem(word: str) -> str:
    for ending in _ENDINGS_LONGEST_FIRST:
        if word.endswith(ending) and len(word) - len(ending) >= _STEM:
            return word.removesuffix(ending)
    return word


def _contraries() -> dict[str, frozenset[str]]:
    table: dict[str, set[str]] = {}
    for entry in _PAIRS.split():
        one, others = entry.split("/")
        for other in others.split(","):
            for a, b in ((one, other), (_stem(one), _stem(other))):
                table.setdefault(a, set()).add(b)
    return {word: frozenset(others) for word, others in table.items()}


_ENDINGS_LONGEST_FIRST = tuple(sorted(_ENDINGS.split(), key=len, reverse=True))
_CONTRARIES = _contraries()
_PREFIXES = tuple(tuple(pair.split("/")) for pair in _PREFIX_PAIRS.split())
_CONTRACTED = frozenset(_CONTRACTIONS.split())
_NUMBERS = frozenset(_NUMBER_WORDS.split())
_NOTS = frozenset(_NEGATIONS.split())


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _numbers(text: str) -> Counter[str]:
    digits = Counter(match.rstrip(".,:") for match in _DIGITS.findall(text))
    return digits + Counter(word for word in (w.lower() for w in _words(text)) if word in _NUMBERS)


def _negations(words: list[str]) -> int:
    return sum(word.lower() in _NOTS or word.lower().replace("’", "'").endswith("n't") for word in words)


def _names(words: list[str]) -> Counter[str]:
    """Capitalised words. One at a sentence's beginning may not be a name, but a wrong one is worse than an objection."""
    return Counter(word for word in words if word[0].isupper())
