"""The formats of Draft 2020-12 as regular expressions; each takes in only what the standard behind it allows.

Formats that are not the draft's say nothing, as the draft wants it. Those that no pattern can tell are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from sgray.text.grammar import regex
from sgray.text.grammar.expressions import Expression

_DAY_OF = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:[0-9]{{3}}[1-9]|[0-9]{{2}}[1-9]0|[0-9][1-9]00|[1-9]000)-{_DAY_OF}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,6}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX4 = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"{_HEX4}(?::{_HEX4}){{7}}"]
    + [
        (rf"{_HEX4}(?::{_HEX4}){{0,{before - 1}}}" if before else "")
        + "::"
        + (rf"(?:{_HEX4}(?::{_HEX4}){{0,{6 - before}}})?" if before < 7 else "")
        for before in range(8)
    ]
)
_UNRESERVED = r"[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2}"
_PATH = rf"(?:/(?:{_UNRESERVED})*)*"
_TAIL = rf"(?:\?(?:{_UNRESERVED}|[/?])*)?(?:#(?:{_UNRESERVED}|[/?])*)?"
_AUTHORITY = r"(?:[A-Za-z0-9\-._~]+@)?[A-Za-z0-9](?:[A-Za-z0-9\-.]*[A-Za-z0-9])?(?::[0-9]{1,5})?"
_URI = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?://{_AUTHORITY}{_PATH}|(?:{_UNRESERVED})+{_PATH}){_TAIL}"
_DAYS, _CLOCK = r"(?:[0-9]+D)", r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = rf"(?:[0-9]+Y(?:[0-9]+M{_DAYS}?)?|[0-9]+M{_DAYS}?|{_DAYS})"

_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": rf"{_DATE}T{_TIME}",
        "duration": rf"P(?:{_DURATION_DATE}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
        "email": rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~\-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~\-]+)*@{_HOST}",
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
        "uri": _URI,
        "uri-reference": rf"(?:{_URI}|{_PATH}{_TAIL})",
        "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
        "relative-json-pointer": r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)+)",
    }
)
REFUSED = ("idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex")


@cache
def format_tree(name: str) -> Expression | None:
    """What a string of this format looks like, whole; None for formats that say nothing."""
    return regex.parse(_PATTERNS[name]) if name in _PATTERNS else None
