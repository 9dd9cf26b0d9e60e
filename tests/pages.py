"""HTML pages as tests read them."""

import re
from html.parser import HTMLParser


class Read(HTMLParser):
    """Tags opened and closed in order, ids, headings, and the text of scripts."""

    VOID = ("meta", "link", "input", "br", "wbr", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.headings, self.tags, self.scripts, self.links = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.links += [value for key, value in attributes.items() if key in ("src", "href", "xlink:href")]
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
