"""Training documents: the project's chat tasks in the wordings of crates/tasks, and plain text.

The texts must be those that `oscar eval tasks` writes (crates/tasks/src/chat), the draws need not: no case
here is one of the evaluation's, because the random stream is Python's own. Two things differ on purpose.
A document may ask further questions after the first, so that one haystack teaches many answers, and each
document says how much each token counts in the loss.
"""

import random
import uuid
from pathlib import Path

import numpy as np
from filler import Filler, Grammar

NAMES = (
    "Ada Bruno Chloe Dmitri Elena Farid Greta Hugo Ines Jonas Kira Luis Mona Nils Olga Pedro Quinn Rosa Sven "
    "Tara Umar Vera Wanda Ximena Yusuf Zoe Anton Beata Carlos Dora"
).split()
ADJECTIVES = (
    "amber brave calm deep eager fancy gentle happy icy jolly keen lucky mellow noble odd plain quick rapid sharp "
    "tender upset vivid warm young zesty bright cold dusty empty fresh grand hollow iron jagged kind loud misty "
    "narrow old pale quiet rough silent tall urban vast wild yellow"
).split()
NOUNS = (
    "anchor bridge candle desert engine forest garden harbor island jacket kettle lantern mirror needle orchard "
    "palace quarry river saddle temple uniform valley window yacht zebra apple basket castle dragon eagle falcon "
    "glacier hammer insect jungle knight ladder magnet notebook ocean pencil rabbit shelter tunnel umbrella village "
    "whistle"
).split()
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# kind: (told as, asked as, values); a code is four digits.
FACTS = {
    "city": (
        "lives in",
        "Where does {} live?",
        "Lisbon Oslo Cairo Lima Quito Hanoi Perth Turin Kyoto Dakar Sofia Minsk Accra Bergen Leeds Porto Basel Natal "
        "Osaka Tunis".split(),
    ),
    "job": (
        "works as a",
        "What does {} work as?",
        "baker pilot teacher nurse sailor tailor chemist farmer painter judge plumber dancer".split(),
    ),
    "pet": (
        "has a pet",
        "Which pet does {} have?",
        "cat dog parrot turtle rabbit goldfish hamster lizard pony ferret".split(),
    ),
    "food": (
        "loves to eat",
        "What does {} love to eat?",
        "noodles olives pancakes mangoes lentils dumplings cherries walnuts risotto tacos pickles waffles figs oysters "
        "plums".split(),
    ),
    "code": ("keeps a box with code", "Which code does the box of {} have?", None),
}
EVALUATED = ["niah_lines", "niah_uuid", "niah_multiquery", "memory", "running_sum", "copy"]
# How often a document of each kind is drawn.
MIX = {
    "niah_lines": 13, "niah_uuid": 13, "niah_multiquery": 12, "memory": 13, "running_sum": 16, "copy": 14,
    "niah_single": 3, "niah_multikey": 3, "niah_multivalue": 2, "vt": 4, "program": 3, "sort": 1, "passkey": 0.5,
    "resume": 1, "text": 6, "repeat": 2,
}  # fmt: skip
# Mostly filler, which can be learned; in the others most of the prompt is random.
HAYSTACKS = {"memory", "niah_single", "niah_multiquery", "niah_multikey", "niah_multivalue", "vt"}
# Repeated random tokens form the copying heads that everything else needs.
REPEATS_AT_FIRST = 10
SHORT_ROWS = 1024
# Further questions in a document, at most; conversations ask twice as many.
MOST_QUESTIONS = 12


def number(r, digits):
    return str(r.randrange(10 ** (digits - 1), 10**digits))


def word_key(r):
    return f"{r.choice(ADJECTIVES)}-{r.choice(NOUNS)}"


def uuid_text(r):
    return str(uuid.UUID(int=r.getrandbits(128)))


def haystack(r, budget, filler, needles):
    noise = r.random() < 0.3
    parts, size = [], 0
    while size < budget:
        part = NOISE if noise else filler()
        parts.append(part)
        size += len(part) + 1
    for needle in needles:
        parts.insert(r.randrange(len(parts) + 1), needle)
    return "\n".join(parts)


class Chats:
    """Writes the tasks. Each method returns turns: user and assistant in turn, the first question as evaluated.

    `more` is the number of further questions.
    """

    def __init__(self, r, filler):
        self.r, self.filler = r, filler

    def niah(self, budget, more, keys=1, values=1, queries=1, distractors=0, uuids=False, share=1.0):
        r = self.r
        names = []
        while len(names) < keys + distractors:
            name = uuid_text(r) if uuids else word_key(r)
            if name not in names:
                names.append(name)
        what = "uuid" if uuids else "number"
        table = {name: [uuid_text(r) if uuids else number(r, 7) for _ in range(values)] for name in names}
        needles = [f"One of the special magic {what}s for {k} is: {v}." for k, vs in table.items() for v in vs]
        r.shuffle(needles)
        text = haystack(r, int(budget * share) - sum(map(len, needles)), self.filler, needles)

        def exchange(asked):
            found = {key: ", ".join(sorted(table[key], key=text.index)) for key in asked}
            if len(asked) > 1:
                question = f"What are the special magic {what}s for {', '.join(asked)} mentioned in the text?"
                return [question, "\n".join(f"{key}: {found[key]}" for key in asked)]
            start = "What are all the special magic {}s" if values > 1 else "What is the special magic {}"
            return [f"{start.format(what)} for {asked[0]} mentioned in the text?", found[asked[0]]]

        pool = names if distractors else names[:keys]
        turns = exchange(r.sample(pool, min(queries, len(pool))))
        turns[0] = f"Some special magic {what}s are hidden in the text. Memorize them.\n{text}\n{turns[0]}"
        for _ in range(more):
            turns += exchange(r.sample(names, 1 if r.random() < 0.7 else min(4, len(names))))
        return turns

    def niah_single(self, budget, more):
        return self.niah(budget, min(more, 1))

    def niah_multikey(self, budget, more):
        return self.niah(budget, min(more, 4), distractors=3)

    def niah_multivalue(self, budget, more):
        return self.niah(budget, 0, values=4)

    def niah_multiquery(self, budget, more):
        extra = self.r.randrange(1, 16) if more and self.r.random() < 0.6 else 0
        # Without further questions the four keys are all there are, as in the evaluation.
        return self.niah(budget, min(more, 2 + extra // 2), keys=4 + extra, queries=4)

    def niah_lines(self, budget, more):
        return self.niah(0, more, distractors=max(3, budget // 60))

    def niah_uuid(self, budget, more):
        return self.niah(budget, min(more, 6), distractors=max(1, budget // 400), uuids=True, share=0.5)

    def vt(self, budget, more):
        r, seen, chains = self.r, set(), []
        for _ in range(2):
            names = []
            while len(names) < 5:
                name = "".join(r.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
                if name not in seen:
                    seen.add(name)
                    names.append(name)
            value = number(r, 5)
            lines = [f"VAR {names[0]} = {value}"]
            lines += [f"VAR {after} = VAR {before}" for before, after in zip(names, names[1:])]
            chains.append((value, names, lines))
        noise = r.random() < 0.5
        parts, size = [], 0
        while size < budget:
            parts.append(NOISE if noise else self.filler())
            size += len(parts[-1])
        for _, _, lines in chains:
            places = sorted(r.randrange(len(parts) + 1) for _ in lines)
            for i, (place, line) in enumerate(zip(places, lines)):
                parts.insert(place + i, line)
        turns = []
        for value, names, _ in chains[: 2 if more else 1]:
            turns += [f"Find all variables that are assigned the value {value}.", " ".join(names)]
        head = "Memorize and track the chain(s) of variable assignment hidden in the text.\n"
        turns[0] = head + "\n".join(parts) + "\n" + turns[0]
        return turns

    def running_sum(self, budget, more):
        terms = [self.r.randint(1, 99) for _ in range(min(400, max(5, budget // 22)))]
        total, steps = 0, []
        for term in terms:
            after = (total + term) % 100
            steps.append(f"{total}+{term}={after}\n")
            total = after
        question = f"Add these numbers modulo 100, step by step: {' '.join(map(str, terms))}"
        return [question, f"{''.join(steps)}Answer: {total}"]

    def program(self, budget, more):
        r, values, source, trace = self.r, {}, [], []
        for _ in range(min(300, max(4, budget // 34))):
            target = r.choice("abcdefghijklmnopqrstuvwxyz")
            if len(values) < 2 or r.random() < 0.15:
                value = r.randint(0, 99)
                source.append(f"{target} = {value}")
                trace.append(source[-1])
            else:
                left, right = r.choice(list(values)), r.choice(list(values))
                a, b, operator = values[left], values[right], r.choice("+-*")
                value = {"+": a + b, "-": a - b, "*": a * b}[operator] % 100
                source.append(f"{target} = {left} {operator} {right}")
                trace.append(f"{target} = {a} {operator} {b} = {value}")
            values[target] = value
        asked = r.choice(list(values))
        head = f"Run this program, every operation modulo 100, one line at a time, then print {asked}."
        return ["\n".join([head, *source]), "\n".join([*trace, f"print {asked}: {values[asked]}"])]

    def copy(self, budget, more):
        r = self.r
        count = min(600, max(5, budget // 14))
        items = [r.choice(NOUNS) if r.random() < 0.6 else number(r, 4) for _ in range(count)]
        # Evaluation skips most lists to reverse, which are short; training has fewer of them.
        if more and r.random() < 0.08:
            items = items[:40]
            return ["Repeat in reverse order: " + " ".join(items), " ".join(reversed(items))]
        return ["Repeat this list: " + " ".join(items), " ".join(items)]

    def sort(self, budget, more):
        numbers = [self.r.randint(0, 999) for _ in range(self.r.randint(4, 30))]
        return ["Sort ascending: " + " ".join(map(str, numbers)), " ".join(map(str, sorted(numbers)))]

    def passkey(self, budget, more):
        key = number(self.r, 5)
        text = haystack(self.r, budget, self.filler, [f"The pass key is {key}. Remember it. {key} is the pass key."])
        head = "There is important info hidden inside a lot of irrelevant text. Find it."
        return [f"{head}\n{text}\nWhat is the pass key?", key]

    def resume(self, budget, more):
        while len(sentences := self.filler().split(". ")) < 3:
            pass
        cut = self.r.randint(1, len(sentences) - 1)
        return [f"Continue this text: {'. '.join(sentences[:cut])}.", ". ".join(sentences[cut:])]

    def memory(self, budget, more):
        r = self.r
        people = r.sample(NAMES, 12)
        turns, facts, size, i = [], {}, 0, 0
        while size < budget or not facts:
            person = people[i % len(people)]
            i += 1
            kind = r.choice(list(FACTS))
            if (person, kind) in facts:
                # Only a code can change: the last one told counts.
                kind = "code"
            told_as, _, values = FACTS[kind]
            value = r.choice(values) if values else number(r, 4)
            facts[person, kind] = value
            turns += [f"My friend {person} {told_as} {value}.", f"Noted: {person}, {kind}, {value}."]
            size += len(turns[-2]) + len(turns[-1])
            for _ in range(r.randrange(3)):
                turns += [f"Read this: {self.filler()}", "I have read it."]
                size += len(turns[-2]) + 20
        for person, kind in r.sample(list(facts), min(len(facts), 1 + 2 * more)):
            turns += [FACTS[kind][1].format(person), facts[person, kind]]
        return turns


def repository_text(root):
    """Documentation and sources of the project, without what calibration and evaluation read."""
    files = sorted(Path(root).glob("*.md")) + sorted(Path(root).glob("docs/*.md"))
    files += sorted(Path(root).glob("crates/*/src/**/*.rs"))
    return "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


class Documents:
    """Tokenized documents with a loss weight for each token, packed into rows."""

    ENDOFTEXT, START, END = 0, 1, 2

    def __init__(self, root, tokenizer, seed):
        self.r = random.Random(f"training {seed}")
        self.tokenizer = tokenizer
        grammar = Grammar((Path(root) / "crates/tasks/src/filler/grammar.txt").read_text())
        self.filler = Filler(grammar, self.r)
        self.chats = Chats(self.r, self.filler)
        self.text = repository_text(root)
        self.vocabulary = tokenizer.get_vocab_size()
        self.header = self.encode(["<|im_start|>assistant\n"])[0]
        digits = [tokenizer.token_to_id(str(digit)) for digit in range(10)]
        self.unpredictable = np.zeros(self.vocabulary, bool)
        self.unpredictable[digits] = True
        # Characters of budget a token, learned from what was written.
        self.ratio = {}
        self.pool = []

    def encode(self, texts):
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def turns(self, task, tokens, more):
        budget = int(tokens * self.ratio.get(task, 2.5))
        return getattr(self.chats, task)(max(0, budget), more)

    @staticmethod
    def render(turns):
        roles = ("user", "assistant")
        return "".join(f"<|im_start|>{roles[i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(turns))

    def weigh(self, ids, context_weight, confirmations):
        """A weight for each token as a target: answers count, the rest hardly. `confirmations` are the answers by
        their order that say nothing new."""
        weights = np.full(len(ids), context_weight, np.float32)
        weights[self.unpredictable[ids]] = 0.0
        starts = np.flatnonzero(ids[: -len(self.header)] == self.START)
        ends = np.flatnonzero(ids == self.END)
        headers = [start for start in starts if np.array_equal(ids[start : start + len(self.header)], self.header)]
        # Turns end in order, and each answer follows a question.
        for turn, (start, end) in enumerate(zip(headers, ends[1::2], strict=True)):
            first = start + len(self.header)
            length = end + 1 - first
            # A long answer counts more than a short one, but not by its whole length.
            weight = min(1.0, max(0.15, 64.0 / length))
            if confirmations:
                # What was told far back comes in few tokens, so each of them counts more.
                weight = 0.1 if turn in confirmations else 2.0
            weights[first : end + 1] = weight
        return weights

    def batch_of_documents(self, kinds, lengths, more):
        """Documents of these kinds and of about these lengths, as (kind, ids, weights)."""
        plans, texts, out = [], [], []
        for task, tokens in zip(kinds, lengths):
            if task == "repeat":
                part = max(8, int(tokens / self.r.choice((2, 2, 2, 3, 4))))
                times = max(2, tokens // part)
                low, high = sorted(self.r.randrange(3, self.vocabulary) for _ in range(2))
                choices = np.random.default_rng(self.r.getrandbits(32))
                # A narrow range of tokens repeats inside the part: telling the places apart takes a longer match.
                ids = choices.integers(low, max(high, low + 20), part).clip(3, self.vocabulary - 1)
                ids = np.tile(ids, times).astype(np.int32)
                weights = np.full(len(ids), 0.15, np.float32)
                weights[:part] = 0.0
                out.append((task, ids, weights))
            elif task == "text":
                if self.r.random() < 0.5:
                    at = self.r.randrange(max(1, len(self.text) - 3 * tokens))
                    piece = self.text[self.text.find("\n", at) + 1 :][: 3 * tokens]
                else:
                    piece = "\n\n".join(self.filler() for _ in range(1 + tokens // 120))
                plans.append((task, len(piece), ()))
                texts.append(piece)
            else:
                turns = self.turns(task, tokens, self.r.randrange(more + 1) if more else 0)
                sure = ("Noted: ", "I have read it.")
                confirmations = {i for i, text in enumerate(turns[1::2]) if text.startswith(sure)}
                plans.append((task, tokens * self.ratio.get(task, 2.5), confirmations))
                texts.append(self.render(turns))
        for (task, budget, confirmations), ids in zip(plans, self.encode(texts)):
            if len(ids) < 8:
                continue
            if task == "text":
                out.append((task, ids, np.full(len(ids), 0.1, np.float32)))
                continue
            ratio = self.ratio.get(task, 2.5)
            # Lists with a shortest and a longest size do not tell the ratio at the ends.
            if 100 < len(ids) < 10_000:
                self.ratio[task] = min(8.0, max(0.5, ratio + 0.1 * (budget / len(ids) - ratio)))
            context_weight = 0.02 if task in HAYSTACKS else 0.004
            out.append((task, ids, self.weigh(ids, context_weight, confirmations)))
        return out

    def refill(self, tokens_a_row, count):
        mix = dict(MIX)
        if tokens_a_row <= SHORT_ROWS:
            mix["repeat"] = REPEATS_AT_FIRST
        kinds = self.r.choices(list(mix), list(mix.values()), k=count)
        lengths = []
        for _ in kinds:
            if self.r.random() < 0.7:
                lengths.append(int(tokens_a_row * self.r.uniform(0.45, 0.97)))
            else:
                lengths.append(int(60 * (tokens_a_row / 120) ** self.r.random()))
        self.pool += self.batch_of_documents(kinds, lengths, MOST_QUESTIONS)

    def rows(self, rows, tokens_a_row):
        """A batch: ids (rows, tokens + 1) and the weights of the targets (rows, tokens)."""
        ids = np.zeros((rows, tokens_a_row + 1), np.uint16)
        weights = np.zeros((rows, tokens_a_row + 1), np.float16)
        for row in range(rows):
            chosen, left, misses = [], tokens_a_row + 1, 0
            while left > 60 and misses < 4:
                if len(self.pool) < 48:
                    self.refill(tokens_a_row, 96)
                candidates = self.r.sample(range(len(self.pool)), 12 if chosen else 1)
                fitting = [i for i in candidates if len(self.pool[i][1]) + 1 <= left]
                if not fitting:
                    misses += 1
                    if not chosen:
                        self.pool.pop(candidates[0])
                        misses = 0
                    continue
                best = max(fitting, key=lambda i: len(self.pool[i][1]))
                chosen.append(self.pool.pop(best))
                left -= len(chosen[-1][1]) + 1
            self.r.shuffle(chosen)
            at = 0
            for _, document, weight in chosen:
                ids[row, at : at + len(document)] = document
                weights[row, at : at + len(document)] = weight
                at += len(document) + 1  # an end of text between documents
            weights[row, 0] = 0.0
        if len(self.pool) > 400:
            # Short documents are left over when rows are long.
            self.r.shuffle(self.pool)
            del self.pool[200:]
        return ids, weights[:, 1:]

    def evaluation(self, task, count, tokens):
        """Cases as the evaluation asks them: one question, `tokens` long within a few percent, padded."""
        ids = np.zeros((count, tokens + 1), np.uint16)
        answers = np.zeros((count, tokens), bool)
        row, size = 0, tokens * 0.96
        for _ in range(40 * count):
            (_, document, weights), = self.batch_of_documents([task], [int(size)], 0) or [(0, [], 0)]
            if not 0.85 * tokens <= len(document) <= tokens:
                size *= 0.97 if len(document) > tokens else 1.01
                size = min(size, tokens * 1.3)
                continue
            header = len(document) - 1
            while not np.array_equal(document[header : header + len(self.header)], self.header):
                header -= 1
            ids[row, : len(document)] = document
            # The line break after the last end of turn is no answer.
            answers[row, header + len(self.header) - 1 : len(document) - 2] = True
            row += 1
            if row == count:
                return ids, answers
        raise RuntimeError(f"{task}: no cases of {tokens} tokens")
