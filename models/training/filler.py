"""Haystack paragraphs, from the grammar of crates/tasks/src/filler/grammar.txt."""

import re

# First names by pronoun, those of crates/tasks/src/filler/grammar.rs.
WOMEN = "Agnes Harriet Lucinda Maren Odile Petra Ruth Sunniva Thelma Yolanda Imogen Freya Constance Brigid".split()
MEN = "Albert Casper Edmund Gideon Leopold Magnus Oswin Rupert Tobias Wendel Ivor Barnaby Dunstan Felix".split()


class Grammar:
    """The grammar, parsed. A paragraph is five to eight sentences on one topic with a cast of two."""

    def __init__(self, text):
        self.shared, self.topics = ({}, []), []
        topic = self.shared
        for line in map(str.strip, text.splitlines()):
            if not line or line.startswith("#"):
                continue
            if line.startswith("topic "):
                topic = self.shared if line == "topic shared" else ({}, [])
                if topic is not self.shared:
                    self.topics.append(topic)
            elif line.startswith("- "):
                topic[1].append(line[2:])
            else:
                slot, choices = line.split(": ", 1)
                topic[0][slot] = choices.split(" | ")

    def paragraph(self, r):
        slots, sentences = r.choice(self.topics)
        woman = r.random() < 0.5
        who = r.choice(WOMEN if woman else MEN)
        other = who
        while other == who:
            other = r.choice(r.choice((WOMEN, MEN)))
        cast = {"who": who, "other": other}
        cast |= zip(("she", "her", "obj"), ("she", "her", "her") if woman else ("he", "his", "him"))
        templates = r.sample(sentences, 4 + r.randrange(3))
        for template in r.sample(self.shared[1], 1 + r.randrange(2)):
            templates.insert(1 + r.randrange(len(templates)), template)

        def expand(template, used):
            return re.sub(r"\{([^}]*)\}", lambda found: slot(found[1], used), template)

        def slot(name, used):
            lower = name.lower()
            article = lower.startswith("a ")
            key = lower[2:] if article else lower
            if key in cast:
                text = cast[key]
            elif choices := slots.get(key) or self.shared[0].get(key):
                for _ in range(9):
                    choice = r.choice(choices)
                    if choice not in used:
                        break
                used.append(choice)
                text = expand(choice, used)
            else:
                text = key
            if article:
                text = ("an " if text[0] in "aeiou" else "a ") + text
            return text[0].upper() + text[1:] if name[0].isupper() else text

        return " ".join(expand(template, []) for template in templates)


class Filler:
    """A pool of paragraphs, renewed as it is used; drawing one anew each time costs too much."""

    SIZE = 3000

    def __init__(self, grammar, r):
        self.grammar, self.pool = grammar, []
        self.r = r

    def __call__(self):
        if len(self.pool) < self.SIZE or self.r.random() < 0.1:
            fresh = self.grammar.paragraph(self.r)
            if len(self.pool) < self.SIZE:
                self.pool.append(fresh)
            else:
                self.pool[self.r.randrange(self.SIZE)] = fresh
            return fresh
        return self.r.choice(self.pool)
