"""Random JSON schemas and regular expressions, and whether an output has the form that it should.

The same seed draws the same forms. They are of moderate size: a few levels, with a few properties
each. Some cannot be satisfied, use keywords that the compiler does not support, or are not schemas;
these may be refused, and must not take long.
"""

from __future__ import annotations

import decimal
import functools
import json
import random
import re

import jsonschema
import regex

NAMES = ("a", "b", "id", "first name", "größe", "x/y", 'q"q', "tab\t", "$ref", "日本", "")
TEXTS = (
    "",
    "x",
    "two words",
    'quo"te',
    "back\\slash",
    "ünï",
    "line\nbreak",
    "日本語",
    "🙂",
    "null",
)
CLASSES = ("[a-z]", "[A-F0-9]", "[^x]", "[^\\n ]", "[äöü]", "\\d", "[\\w.-]", ".", "[ -~]", "\\.")
LITERALS = ("a", "xyz", "0x", " ", "é", "日", "\\+", "\\(", "-", "_")
PATTERNS = (
    "^[a-z]+$",
    "^\\d{3}-\\d{4}$",
    "ab",
    "^x",
    "y$",
    "^(a|bc)*$",
    "^[A-Z][a-z]{0,5}( [a-z]+)?$",
)
FORMATS = {
    "date": r"\d{4}-\d\d-\d\d",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-\d\d-\d\d[tT]\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"(\d{1,3}\.){3}\d{1,3}",
    "email": r".+@.+",
    "hostname": r"[A-Za-z0-9.-]+",
}


def random_form(number):
    """A kind (``"json"`` or ``"regex"``), a form of this kind, and a check of an output."""
    draw = random.Random(number)
    if number % 3 == 2:
        expression = random_regex(draw)
        return "regex", expression, functools.partial(matches, expression)
    schema = random_schema(draw)
    return "json", schema, functools.partial(follows, schema)


def random_regex(draw, depth=0):
    """An expression with the same meaning in Python and llguidance."""
    kind = draw.random()
    if depth > 2 or kind < 0.3:
        atom = draw.choice(CLASSES) if draw.random() < 0.6 else draw.choice(LITERALS)
        return atom + _times(draw)
    if kind < 0.75:
        return "".join(random_regex(draw, depth + 1) for _ in range(draw.randint(1, 4)))
    inner = "|".join(random_regex(draw, depth + 1) for _ in range(draw.randint(1, 4)))
    return f"({draw.choice(('', '?:'))}{inner}){_times(draw)}"


def _times(draw):
    low = draw.randint(0, 4)
    bounds = (f"{{{low}}}", f"{{{low},{low + draw.randint(0, 6)}}}")
    return draw.choice(("", "", "", "?", *bounds, draw.choice("*+")))


def random_schema(draw):
    """A schema with definitions, some of which refer to themselves."""
    names = draw.sample(("node", "item", "a/b"), draw.choice((0, 0, 1, 2)))
    schema = _schema(draw, 0, names)
    if names and isinstance(schema, dict):
        schema["$defs"] = {name: _schema(draw, 1, names) for name in names}
    if isinstance(schema, dict):
        schema.update(draw.choice(({}, {}, {"title": "T"}, {"description": "d", "default": 3})))
    if draw.random() < 0.03:
        schema = _broken(draw, schema)
    return schema


def _schema(draw, depth, names):
    if names and draw.random() < 0.12 + 0.1 * depth:
        return {"$ref": "#/$defs/" + draw.choice(names).replace("/", "~1")}
    leaves = (_integer, _number, _string, _string, _enum, _constant, _simple)
    nests = (_array, _object, _object, _object, _union, _union)
    if depth > 3:
        kinds = leaves
    else:
        kinds = (*leaves, *nests) if depth else (*leaves, *nests, *nests, *nests)
    schema = draw.choice(kinds)(draw, depth, names)
    if draw.random() < 0.02 and isinstance(schema, dict):
        schema.update(_rare(draw))
    return schema


def _integer(draw, depth, names):
    schema = {"type": "integer"}
    low = draw.choice((-1000, -1, 0, 1, 17, 10**9, -(2**63)))
    if draw.random() < 0.6:
        schema[draw.choice(("minimum", "exclusiveMinimum"))] = low
    if draw.random() < 0.6:
        high = low + draw.choice((-1, 1, 9, 10**6))
        schema[draw.choice(("maximum", "exclusiveMaximum"))] = high
    if draw.random() < 0.15:
        schema["multipleOf"] = draw.choice((2, 3, 5, 10, 100))
    return schema


def _number(draw, depth, names):
    schema = {"type": "number"}
    low = draw.choice((-2.5, 0, 0.001, 3, 1e6))
    if draw.random() < 0.6:
        schema[draw.choice(("minimum", "exclusiveMinimum"))] = low
    if draw.random() < 0.6:
        high = low + draw.choice((-0.5, 0.25, 1, 1000))
        schema[draw.choice(("maximum", "exclusiveMaximum"))] = high
    return schema


def _string(draw, depth, names):
    schema = {"type": "string"}
    kind = draw.random()
    if kind < 0.2:
        schema["pattern"] = draw.choice(PATTERNS)
    elif kind < 0.3:
        schema["pattern"] = f"^{random_regex(draw, 1)}$"
    elif kind < 0.4:
        schema["format"] = draw.choice(list(FORMATS))
    elif kind < 0.9:
        schema["maxLength"] = draw.randint(0, 12)
        if draw.random() < 0.4:
            schema["minLength"] = draw.randint(0, 8)
    if kind < 0.15:
        schema["maxLength"] = draw.randint(4, 12)
    return schema


def _value(draw, depth=0):
    kinds = (
        lambda: draw.choice((None, True, False)),
        lambda: draw.choice((0, -1, 7, 2**53, 10**20, 0.5, -1e-7, 1e300)),
        lambda: draw.choice(TEXTS),
        lambda: draw.choice(TEXTS),
        lambda: [_value(draw, depth + 1) for _ in range(draw.randint(0, 3))],
        lambda: {name: _value(draw, depth + 1) for name in draw.sample(NAMES, draw.randint(0, 3))},
    )
    return draw.choice(kinds if depth < 2 else kinds[:4])()


def _enum(draw, depth, names):
    return {"enum": [_value(draw) for _ in range(draw.randint(1, 5))]}


def _constant(draw, depth, names):
    return {"const": _value(draw)}


def _simple(draw, depth, names):
    types = ["null", "boolean", "integer", "string"]
    return draw.choice(
        (
            {"type": "boolean"},
            {"type": "null"},
            {"type": draw.sample(types, 2)},
            {"type": draw.sample(types, 3), "maxLength": 5},
            {"type": "object"} if depth else {"type": "boolean"},
            True if draw.random() < 0.2 else {"type": "boolean"},
        )
    )


def _array(draw, depth, names):
    schema = {"type": "array"}
    if draw.random() < 0.25:
        some = range(draw.randint(1, 3))
        schema["prefixItems"] = [_schema(draw, depth + 1, names) for _ in some]
        schema["items"] = draw.choice((False, _schema(draw, depth + 1, names)))
    elif draw.random() < 0.95:
        schema["items"] = _schema(draw, depth + 1, names)
    if draw.random() < 0.85:
        schema["maxItems"] = draw.randint(0, 4)
    if draw.random() < 0.3:
        schema["minItems"] = draw.randint(0, 3)
    return schema


def _object(draw, depth, names):
    keys = draw.sample(NAMES, draw.randint(0, 4))
    schema = {"type": "object", "properties": {k: _schema(draw, depth + 1, names) for k in keys}}
    if draw.random() < 0.8:
        schema["required"] = [key for key in keys if draw.random() < 0.6]
        if draw.random() < 0.05:
            schema["required"].append("elsewhere")
    more = draw.random()
    if more < 0.75:
        schema["additionalProperties"] = False
    elif more < 0.9:
        schema["additionalProperties"] = _schema(draw, depth + 1, names)
    if draw.random() < 0.06:
        pattern = draw.choice(("^x_[a-z]{1,3}$", "^[0-9]+$", "b"))
        schema["patternProperties"] = {pattern: _schema(draw, depth + 1, names)}
    if draw.random() < 0.05:
        schema[draw.choice(("minProperties", "maxProperties"))] = draw.randint(0, 3)
    return schema


def _union(draw, depth, names):
    key = draw.choice(("anyOf", "anyOf", "anyOf", "oneOf", "allOf"))
    number = draw.randint(1, 2 if key == "allOf" else 3)
    return {key: [_schema(draw, depth + 1, names) for _ in range(number)]}


def _rare(draw):
    return draw.choice(
        (
            {"uniqueItems": True},
            {"not": {"type": "null"}},
            {"contains": {"type": "integer"}},
            {"dependentRequired": {"a": ["b"]}},
            {"if": {"type": "string"}, "then": {"maxLength": 2}},
            {"propertyNames": {"maxLength": 3}},
            {"unevaluatedProperties": False},
            {"x-unknown": 1},
            {"format": "no-such-format"},
            {"$ref": "#/properties/a"},
            {"$ref": "https://example.invalid/other.json"},
        )
    )


def _broken(draw, schema):
    """A schema with a value of a wrong kind somewhere near its top."""
    key = draw.choice(
        ("type", "properties", "items", "anyOf", "minimum", "pattern", "$defs", "enum")
    )
    wrong = draw.choice((None, 7, "nonsense", [], {}, [1], {"type": 3}, "((("))
    return {**(schema if isinstance(schema, dict) else {}), key: wrong}


def follows(schema, text):
    """Why a text does not follow a schema; ``None`` where it does.

    Numbers are read as doubles, as most readers do, or exactly: 1e300 may be written with all of
    its digits, and 1000000.0000000000000001 is more than a million.
    """
    try:
        as_doubles = json.loads(text, parse_int=lambda t: int(t) if len(t) < 17 else float(t))
        exact = json.loads(text, parse_float=decimal.Decimal)
    except ValueError as error:
        return f"no JSON: {error}"
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = Validator(schema, format_checker=FORMAT_CHECKER)
        errors = [next(validator.iter_errors(value), None) for value in (as_doubles, exact)]
    except (jsonschema.SchemaError, RecursionError):
        return None  # no schema, or one that refers to itself without end: any output will do
    return None if None in errors else f"{list(errors[0].absolute_path)}: {errors[0].message[:200]}"


def matches(expression, text):
    """Why a text does not match an expression as a whole; ``None`` where it does."""
    is_found = _within_a_second(regex.fullmatch, expression, text)
    return None if is_found else f"{text!r} does not match"


def _within_a_second(match, expression, text):
    """Whether a text matches; also true if backtracking takes longer than a second."""
    try:
        return match(expression, text, timeout=1) is not None
    except TimeoutError:
        return True


def _check_pattern(validator, pattern, value, schema):
    if isinstance(value, str) and not _within_a_second(regex.search, pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": _check_pattern}
)
FORMAT_CHECKER = jsonschema.FormatChecker(formats=())
for _name, _pattern in FORMATS.items():
    FORMAT_CHECKER.checks(_name)(
        lambda value, pattern=_pattern: (
            not isinstance(value, str) or re.fullmatch(pattern, value) is not None
        )
    )
