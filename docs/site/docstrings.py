"""The package as griffe reads it: its examples, arguments that share an item, and names that the stub only overloads."""

import re

import griffe

import ejkernel

EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
ITEM = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<words>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Turns our docstrings into the form that griffe knows: ours name an example `Example:`."""

    def on_package(self, *, pkg, **_):
        """Called when the package is read. An overload without an implementation is no member: that is where the name lives."""
        for name, home in ejkernel._HOMES.items():
            if pkg.path == "ejkernel" and name not in pkg.members:
                pkg.set_member(name, griffe.Alias(name, f"{home}.{name}"))

    def on_object(self, *, obj, **_):
        """Called for each object of the package."""
        if obj.docstring is None:
            return
        text = EXAMPLE.sub("Examples:", obj.docstring.value)
        if obj.is_function:
            known = {parameter.name for parameter in obj.parameters}
            text = ITEM.sub(lambda match: separate(match, known), text)
        obj.docstring.value = text


def separate(match, known):
    """An item for each of the arguments that share one; the words stay with the first."""
    first, *others = match["names"].split(", ")
    if not known.issuperset([first, *others]):
        return match[0]
    beside = " and ".join(f"`{name}`" for name in others)
    return "\n".join(
        [
            f"{match['indent']}{first}: (with {beside}) {match['words']}",
            *(f"{match['indent']}{name}: See `{first}`." for name in others),
        ]
    )
