"""The words of the tasks, as data, in two halves: what training sees, and what only evaluation sees.

`TRAIN` and `TEST` share no attribute, entity, value kind, fact form, question form,
instruction or relation; a test checks it.
Forms have slots: {e} an entity, {a} an attribute, {v} its value, {A} and {E} the same as identifiers (`badge_number`).
"""

from __future__ import annotations

from dataclasses import dataclass


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().split("\n"))


def listed(text: str) -> tuple[str, ...]:
    """The parts of a text between its commas."""
    return tuple(part.strip() for part in text.replace("\n", " ").split(",") if part.strip())


@dataclass(frozen=True)
class Relation:
    """A fact said with a verb: its sentence, its questions, the questions for its subject, and its value's kind."""

    subject: str
    value: str
    facts: tuple[str, ...]
    questions: tuple[str, ...]
    inverse: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wording:
    """One half of the words."""

    first_names: tuple[str, ...]
    surnames: tuple[str, ...]
    syllables: tuple[str, ...]
    things: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]]  # kind: heads, tails, how they are joined
    pools: dict[str, tuple[str, ...]]  # values that are words
    value_kinds: tuple[str, ...]  # values that are made: see values.py
    qualifiers: tuple[str, ...]
    nouns: tuple[str, ...]  # of attributes with made values
    word_attributes: dict[str, tuple[str, ...]]  # attributes whose value is of a pool
    statements: tuple[str, ...]
    lead_ins: tuple[str, ...]
    tails: tuple[str, ...]
    records: tuple[str, ...]  # one line of a file: key-value, log, JSON, code, dialogue, mark-up
    tables: tuple[str, ...]
    split: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]
    keywords: tuple[str, ...]
    subject_questions: tuple[str, ...]  # ask for the entity
    several_questions: tuple[str, ...]
    openers: tuple[str, ...]
    instructions: tuple[str, ...]
    sentence_instructions: tuple[str, ...]
    before: tuple[str, ...]  # the question stands before the document
    relations: tuple[Relation, ...]
    chains: tuple[tuple[str, str, str], ...]
    counts: tuple[tuple[str, str], ...]
    commons: tuple[tuple[str, str], ...]
    moves: tuple[str, ...]
    takes: tuple[str, ...]
    where: tuple[str, ...]
    carries: tuple[str, ...]
    copies: tuple[str, ...]
    edits: tuple[str, ...]
    clozes: tuple[str, ...]
    definitions: tuple[str, ...]
    acknowledgements: tuple[str, ...]
    tool_results: tuple[str, ...]


TRAIN = Wording(
    first_names=listed(
        """Alice, Bruno, Carla, Daniel, Elena, Felix, Greta, Hassan, Irene, Jonas, Kavita, Liam, Maria, Nadia,
        Oscar, Paula,
        Quentin, Rosa, Samuel, Tara, Umar, Vera, Walter, Xenia, Yusuf, Zoe, Miriam, Peter, Anna, Boris, Clara,
        David, Emma,
        Frank, Gina, Henry, Ida, Jack, Karen, Leo, Mona, Nina, Otto, Petra, Ralph, Sara, Tom, Ursula, Victor,
        Wendy, Arthur,
        Bella, Conrad, Dora, Edwin, Flora, George, Hilda, Ivan, Julia, Kurt, Laura, Martin, Norma, Olga, Philip,
        Ruth, Simon,
        Thea, Vincent, Agnes, Basil, Celia, Dennis, Edith, Fred, Gloria, Harold, Iris, James, Kate, Lewis, Mabel,
        Neil, Olive,
        Paul, Rita, Stephen, Ada, Bob, Carol, Dan, Eve, Grace, Hugo, Kim, Mike, Nora, Sam, Ted, Tina, Will, Zack"""
    ),
    surnames=listed(
        """Smith, Keller, Moreau, Johansson, Okafor, Rossi, Novak, Tanaka, Silva, Brown, Fischer, Lindberg, Hughes,
        Kowalski,
        Dubois, Petrov, Murphy, Haddad, Iyer, Nakamura, Weber, Costa, Walsh, Olsen, Vargas, Young, Carter, Baker,
        Turner, Cooper,
        Reed, Ward, Foster, Gray, Stone, Wood, Marsh, Fields, Hill, Rivers"""
    ),
    syllables=listed(
        """ba, be, bo, da, de, do, fa, fi, ga, go, ka, ke, ki, la, le, li, lo, ma, me, mi, mo, na, ne, ni, no, pa,
        pe, ra, re,
        ri, ro, sa, se, so, ta, te, ti, to, va, ve, vi, za, zo"""
    ),
    things={
        "company": (
            listed(
                """North, Silver, Blue, Iron, Summit, River, Green, Atlas, Bright, Stone, Delta, Royal, Union,
                Pacific, Eagle,
                Cedar, Golden, Harbor, Metro, Prime, Oak, Star, Red, Crown, Liberty"""
            ),
            listed(
                """Systems, Foods, Motors, Bank, Textiles, Energy, Labs, Partners, Press, Tools, Airlines, Steel,
                Media"""
            ),
            " ",
        ),
        "server": (
            listed("db, web, cache, mail, auth, proxy, backup, build, queue, search"),
            listed("east-1, east-2, west-1, west-3, north-4, eu-2, eu-5, us-7, us-9, test-6"),
            "-",
        ),
        "project": (
            listed("Project, Operation, Mission, Plan"),
            listed(
                """Falcon, Horizon, Sunrise, Granite, Comet, Maple, Orion, Thunder, Willow, Phoenix, Tiger, Breeze,
                Nova"""
            ),
            " ",
        ),
        "town": (
            listed(
                """Ash, Bram, Cold, Dun, East, Fair, Glen, Hart, King, Lang, Mill, Nor, Old, Pem, Rock, South, Thorn,
                West"""
            ),
            listed("ford, ton, bury, ham, field, wick, bridge, stead, well, wood"),
            "",
        ),
        "room": (
            listed("""the red, the blue, the upper, the lower, the old, the small, the large, the north,
            the south"""),
            listed("room, hall, office, store, cellar, library, workshop, kitchen, gallery"),
            " ",
        ),
        "machine": (
            listed("pump, drill, printer, engine, scanner, lift, oven, press, lamp, valve"),
            listed("A1, A2, B3, B7, C4, C9, D2, D5, E6, E8, F1, F3"),
            " ",
        ),
        "book": (
            listed("The Silent, The Last, The Broken, The Hidden, A Distant, The Long, The Green, A Quiet"),
            listed("River, Garden, Letter, Winter, Mountain, Road, House, Summer, Island, Door"),
            " ",
        ),
        "module": (
            listed("user, order, image, event, token, text, file, graph, price, mail"),
            listed("parser, loader, store, index, filter, client, writer, reader, router, cache"),
            "_",
        ),
    },
    pools={
        "colour": listed("red, blue, green, yellow, white, black, brown, pink, orange, purple, silver, gold"),
        "city": listed(
            """London, Paris, Tokyo, Berlin, Madrid, Cairo, Lima, Oslo, Dublin, Vienna, Prague, Rome, Athens,
            Boston, Chicago,
            Denver, Moscow, Delhi, Seoul, Sydney, Lisbon, Warsaw, Geneva, Milan, Bergen, Quito, Havana, Tunis,
            Dakar, Accra"""
        ),
        "job": listed(
            """doctor, teacher, engineer, lawyer, painter, farmer, baker, pilot, nurse, writer, driver, judge,
            clerk, singer,
            carpenter, sailor, editor, gardener, tailor, chemist"""
        ),
        "object": listed(
            """apple, table, river, stone, house, garden, window, paper, letter, music, summer, winter, captain,
            school, bridge,
            forest, market, mirror, button, candle, basket, hammer, ladder, pocket, ribbon, saddle, tunnel, valley,
            wagon,
            anchor, barrel, carpet, dragon, feather, guitar, helmet, island, jacket, kettle, lemon, marble, needle,
            onion,
            pepper, rabbit"""
        ),
        "animal": listed("dog, cat, horse, rabbit, parrot, goat, sheep, turtle, mouse, duck, fox, bear"),
        "food": listed("bread, cheese, soup, rice, fish, cake, eggs, apples, pasta, butter, honey, chicken"),
        "month": listed("January, February, March, May, June, August, September, November"),
    },
    value_kinds=("number", "long number", "identifier", "date", "name", "two words", "price", "decimal"),
    qualifiers=listed(
        """red, blue, green, silver, golden, secret, hidden, special, magic, ancient, broken, bright, dark, quiet,
        simple, final,
        first, second, north, south, early, late, public, private, local, common, rare, plain, modern, new, old,
        main, spare,
        primary, daily, yearly, official, internal, temporary, current, previous, total, maximum, average"""
    ),
    nouns=listed(
        """code, number, password, key, token, label, pin, badge, account, order, serial number, score, price,
        weight, height,
        address, port, size, limit, budget, rate, id, balance, salary, extension, locker, seat, reference, version,
        rank,
        deadline, start date, end date, birthday, contact, owner, manager, signature, alias, model, batch, invoice,
        phone number,
        delay, length, count, grade, speed"""
    ),
    word_attributes={
        "colour": listed("colour, favourite colour, paint, coat colour, flag colour, cover colour"),
        "city": listed("city, home town, birthplace, destination, head office, branch, location, base"),
        "job": listed("job, profession, trade, occupation, first job, dream job"),
        "object": listed("symbol, gift, prize, favourite word, theme, sign, keyword, secret word, emblem, topic"),
        "animal": listed("pet, favourite animal, mascot, guard animal"),
        "food": listed("lunch, favourite dish, breakfast, main product, speciality"),
        "month": listed("month of birth, opening month, best month, review month"),
    },
    statements=_lines(
        """
        The {a} of {e} is {v}.
        {e}'s {a} is {v}.
        The {a} for {e} is {v}.
        {e} has the {a} {v}.
        {e} has {v} as {a}.
        For {e}, the {a} is {v}.
        {v} is the {a} of {e}.
        The {a} of {e} was set to {v}.
        According to the file, {e}'s {a} is {v}.
        As for {e}, the {a} is {v}.
        The {a} that belongs to {e} is {v}.
        It was agreed that the {a} of {e} would be {v}.
        {e} was given {v} as {a}.
        We recorded {v} as the {a} for {e}.
        Please note that {e} has a new {a}: {v}.
        When asked about the {a}, {e} always says {v}.
        Everybody knows that the {a} of {e} is {v}.
        The list shows {v} as {e}'s {a}.
        On the form of {e}, the field for {a} contains {v}.
        {e}, whose {a} is {v}, was there too.
        They changed the {a} of {e} to {v} last week.
        With {v} as its {a}, {e} was easy to find.
        {e} chose {v} for the {a}.
        The {a} is {v} in the case of {e}.
        I wrote down {e}'s {a}, which is {v}.
        The report gives {v} as the {a} of {e}.
        Since the spring, {e} has had {v} as {a}.
        The {a} printed beside {e} is {v}.
        You will need the {a} of {e}, namely {v}.
        Do not forget: the {a} for {e} is {v}.
        Nobody expected the {a} of {e} to be {v}.
        The value {v} is used as the {a} by {e}.
        """
    ),
    lead_ins=(
        "Note: ",
        "In short, ",
        "As far as we know, ",
        "As of today, ",
        "To be clear, ",
        "Well, ",
        "Once more: ",
        "Also, ",
        "He said that ",
        "It says here that ",
        "In fact, ",
        "However, ",
        "For the record: ",
        "At present, ",
    ),
    tails=(
        " at the moment",
        " for now",
        ", as everybody agreed",
        " this year",
        ", I think",
        " and nothing else",
        " again",
        ", they said",
    ),
    records=_lines(
        """
        {e}: {a} = {v}
        {e} | {a} | {v}
        {a} ({e}): {v}
        {e} - {a}: {v}
        [{e}] {a}={v}
        * {e}, {a}: {v}
        - {a} of {e}: {v}
        {e} -> {a} -> {v}
        INFO {e}: {a} is now {v}
        DEBUG set {a} of {e} to {v}
        12:04:31 {e} {a}={v}
        2024-03-11 08:15 [{e}] {a}: {v}
        WARN {a} changed, owner={e}, value={v}
        {{"name": "{e}", "{A}": "{v}"}}
        {{"{A}": "{v}", "of": "{e}"}}
        {{"id": "{e}", "field": "{a}", "value": "{v}"}}
        "{e}","{a}","{v}"
        {e};{a};{v}
        {e}, {a}, {v}
        {E}_{A} = "{v}"
        {E}.{A} = {v}
        config["{e}"]["{A}"] = "{v}"
        const {E}_{A} = "{v}";
        set_{A}("{e}", "{v}")
        <{A} of="{e}">{v}</{A}>
        <li>{e}: {a} {v}</li>
        # {e}: {a} {v}
        // {a} of {e} is {v}
        Q: What is the {a} of {e}? A: {v}
        "What about {e}?" "The {a} is {v}," she said.
        Clerk: And the {a} for {e}? Guest: It is {v}.
        | {e} | {a} | {v} |
        {e} ({a} {v})
        item: {e}; {a}: {v};
        """
    ),
    tables=("markdown", "csv", "json", "yaml"),
    split=(
        ("The next entry is about {e}.", "The {a} is {v}."),
        ("{e} came in late.", "The {a} given at the door was {v}."),
        ("There is also {e}.", "Its {a} is {v}."),
        ("Let us turn to {e}.", "We have {v} as the {a} here."),
        ("We talked about {e} for a while.", "In the end the {a} became {v}."),
        ("I looked up {e}.", "They list {v} as the {a}."),
    ),
    questions=_lines(
        """
        What is the {a} of {e}?
        What is {e}'s {a}?
        What is the {a} for {e}?
        Which {a} does {e} have?
        Tell me the {a} of {e}.
        Can you tell me the {a} of {e}?
        Can you tell me what {e}'s {a} is?
        Give me the {a} for {e}.
        I need the {a} of {e}.
        Find the {a} of {e}.
        Look up the {a} for {e}.
        Do you know the {a} of {e}?
        What was the {a} of {e}?
        What {a} does {e} have?
        What is the {a} that belongs to {e}?
        As for {e}, what is the {a}?
        Where {e} is concerned, what is the {a}?
        What does the text say about the {a} of {e}?
        According to the text, what is the {a} of {e}?
        I am looking for {e}'s {a}. What is it?
        What was set as the {a} for {e}?
        Which value is given for the {a} of {e}?
        Say the {a} of {e}.
        Somewhere above is the {a} for {e}. What is it?
        What is written as the {a} of {e}?
        Please tell me {e}'s {a}.
        Could you find the {a} of {e}?
        Remind me of the {a} of {e}.
        Show the {a} for {e}.
        Which is the {a} of {e}?
        """
    ),
    keywords=_lines(
        """
        {a} of {e}
        {e} {a}
        {a} {e}
        {e}: {a}?
        {a} for {e}?
        {e}'s {a}
        find {a}, {e}
        {e} - {a}
        """
    ),
    subject_questions=_lines(
        """
        Who or what has {v} as {a}?
        Whose {a} is {v}?
        Which one has the {a} {v}?
        {v} is the {a} of whom or what?
        To whom or what does the {a} {v} belong?
        Find the one whose {a} is {v}.
        """
    ),
    several_questions=_lines(
        """
        What are all the {a} values of {e}?
        List every {a} of {e}.
        Which values does the {a} of {e} have?
        Give all values for the {a} of {e}.
        """
    ),
    openers=(
        "",
        "",
        "",
        "",
        "Please help. ",
        "Hello! ",
        "One question: ",
        "Now: ",
        "Quick question. ",
        "Thanks. ",
        "Question: ",
        "OK. ",
    ),
    instructions=(
        "",
        "",
        "",
        "",
        " Reply with the value only.",
        " Answer briefly.",
        " Just the answer.",
        " Keep it short.",
        " Do not explain.",
        " Give only the answer.",
        "\nAnswer:",
        " Use the words of the text.",
    ),
    sentence_instructions=(" Quote the line.", " Answer with the whole line.", " Show the line that says it."),
    before=_lines(
        """
        {q} The text follows.
        Read the text below and answer: {q}
        {q} Here is the document:
        Question: {q} Document:
        """
    ),
    relations=(
        Relation(
            "person",
            "city",
            ("{e} lives in {v}.", "{e} has lived in {v} for years.", "{e} has a flat in {v}."),
            ("Where does {e} live?", "In which city does {e} live?", "where does {e} live"),
            ("Who lives in {v}?",),
        ),
        Relation(
            "person",
            "city",
            ("{e} was born in {v}.", "{e} came into the world in {v}."),
            ("Where was {e} born?", "In which place was {e} born?", "{e} born where"),
            ("Who was born in {v}?",),
        ),
        Relation(
            "person",
            "city",
            ("{e} travelled to {v}.", "{e} took a train to {v}.", "{e} went to {v} by boat."),
            ("Where did {e} go?", "Where did {e} travel to?", "To which city did {e} go?"),
            ("Who travelled to {v}?",),
        ),
        Relation(
            "person",
            "company",
            ("{e} works for {v}.", "{e} is employed by {v}.", "{e} has a job at {v}."),
            ("Who does {e} work for?", "Where does {e} work?", "Which company employs {e}?"),
            ("Who works for {v}?",),
        ),
        Relation(
            "person",
            "job",
            ("{e} is a {v}.", "{e} works as a {v}.", "{e} became a {v}."),
            ("What does {e} do?", "What is {e} by profession?", "As what does {e} work?"),
            ("Who is a {v}?",),
        ),
        Relation(
            "person",
            "animal",
            ("{e} owns a {v}.", "{e} keeps a {v} at home.", "{e} has a {v}."),
            ("What animal does {e} own?", "Which pet does {e} keep?", "What does {e} keep at home?"),
            ("Who owns a {v}?",),
        ),
        Relation(
            "person",
            "food",
            ("{e} likes to eat {v}.", "{e} had {v} for lunch.", "{e} cooked {v}."),
            ("What did {e} eat?", "Which food does {e} like?", "What did {e} have for lunch?"),
        ),
        Relation(
            "person",
            "object",
            ("{e} bought a {v}.", "{e} paid for a {v}.", "{e} found a {v} in the street."),
            ("What did {e} buy?", "What did {e} get?", "Which thing did {e} buy?"),
            ("Who bought a {v}?",),
        ),
        Relation(
            "person",
            "object",
            ("{e} lost a {v}.", "{e} could not find the {v} again."),
            ("What did {e} lose?", "Which thing is {e} missing?"),
            ("Who lost a {v}?",),
        ),
        Relation(
            "person",
            "person",
            ("{e} is married to {v}.", "{e} is the husband of {v}.", "{e} married {v}."),
            ("Who is {e} married to?", "Who did {e} marry?"),
            ("Who married {v}?",),
        ),
        Relation(
            "person",
            "person",
            ("{e} wrote a letter to {v}.", "{e} sent {v} a letter."),
            ("Who did {e} write to?", "To whom did {e} write?"),
            ("Who wrote to {v}?",),
        ),
        Relation(
            "company",
            "person",
            ("{v} is the head of {e}.", "{e} is led by {v}.", "{v} runs {e}."),
            ("Who is the head of {e}?", "Who leads {e}?", "Who runs {e}?"),
            ("What does {v} run?",),
        ),
        Relation(
            "company",
            "person",
            ("{v} founded {e}.", "{e} was started by {v}."),
            ("Who founded {e}?", "Who started {e}?"),
            ("What did {v} found?",),
        ),
        Relation(
            "company",
            "city",
            ("{e} is based in {v}.", "{e} has its offices in {v}."),
            ("Where is {e} based?", "Where are the offices of {e}?"),
            ("Which company is based in {v}?",),
        ),
        Relation(
            "company",
            "number",
            ("{e} has {v} employees.", "{v} people work at {e}."),
            ("How many employees does {e} have?", "How many people work at {e}?"),
        ),
        Relation(
            "book",
            "person",
            ("{e} was written by {v}.", "{v} is the author of {e}.", "{v} wrote {e}."),
            ("Who wrote {e}?", "Who is the author of {e}?"),
            ("What did {v} write?",),
        ),
        Relation(
            "book",
            "number",
            ("{e} has {v} pages.", "There are {v} pages in {e}."),
            ("How many pages does {e} have?", "How long is {e}?"),
        ),
        Relation(
            "project",
            "date",
            ("{e} began on {v}.", "{e} was started on {v}."),
            ("When did {e} begin?", "On which day did {e} start?"),
        ),
        Relation(
            "project",
            "person",
            ("{v} is in charge of {e}.", "{e} is in the hands of {v}."),
            ("Who is in charge of {e}?", "Who is responsible for {e}?"),
            ("What is {v} in charge of?",),
        ),
        Relation(
            "server",
            "number",
            ("{e} listens on port {v}.", "Port {v} is open on {e}."),
            ("Which port is open on {e}?", "On which port does {e} listen?"),
        ),
        Relation(
            "room",
            "object",
            ("There is a {v} in {e}.", "Someone left a {v} in {e}.", "You can find a {v} in {e}."),
            ("What is in {e}?", "What can be found in {e}?"),
            ("Where is the {v}?", "In which room is the {v}?"),
        ),
        Relation(
            "town",
            "number",
            ("{e} has {v} inhabitants.", "{v} people live in {e}."),
            ("How many people live in {e}?", "How many inhabitants does {e} have?"),
        ),
        Relation(
            "machine",
            "price",
            ("{e} costs {v}.", "The price of {e} is {v}.", "They sold {e} for {v}."),
            ("How much is {e}?", "What does {e} cost?", "What is the price of {e}?"),
        ),
        Relation(
            "person",
            "number",
            ("{e} has {v} points.", "{e} scored {v} points."),
            ("How many points does {e} have?", "How many points did {e} score?"),
            ("Who has {v} points?",),
        ),
        Relation(
            "person",
            "date",
            ("{e} was hired on {v}.", "{e} started work on {v}."),
            ("When was {e} hired?", "When did {e} start work?"),
            ("Who was hired on {v}?",),
        ),
        Relation(
            "person",
            "colour",
            ("{e} wore a {v} coat.", "{e} came in a {v} coat."),
            ("What colour was {e}'s coat?", "Which coat did {e} wear?"),
        ),
    ),
    chains=(
        ("Let {x} = {v}.", "Let {y} = {x}.", "What is the value of {x}?"),
        ("{x} = {v}", "{y} = {x}", "What is {x}?"),
        ("Set {x} to {v}.", "Set {y} to {x}.", "Which value does {x} have?"),
        ("{x} is {v}.", "{y} is the same as {x}.", "Find the value of {x}."),
        ("int {x} = {v};", "int {y} = {x};", "value of {x}"),
    ),
    counts=(
        ("{e} called.", "How many times did {e} call?"),
        ("{e} visited the shop.", "How often did {e} visit the shop?"),
        ("ERROR in {e}", "How many errors are there in {e}?"),
    ),
    commons=(
        ("Words: {list}.", "What is the most common word in the list of words?"),
        ("Tags: {list}", "Which tag occurs most often?"),
        ("Votes: {list}.", "Which word got the most votes?"),
    ),
    moves=("{p} went to the {l}.", "{p} moved to the {l}.", "{p} walked into the {l}.", "{p} ran to the {l}."),
    takes=("{p} took the {o}.", "{p} picked up the {o}.", "{p} has the {o} now."),
    where=("Where is {p}?", "Where is {p} now?", "In which room is {p}?", "where is {p}"),
    carries=("Who has the {o}?", "Who took the {o}?", "who has the {o}"),
    copies=(
        'Repeat the sentence that begins with "{s}".',
        'Copy the line that starts with "{s}".',
        'Write out the passage beginning "{s}".',
    ),
    edits=(
        'Repeat the sentence that begins with "{s}", but write {n} instead of {o}.',
        'Copy the line that starts with "{s}" and replace {o} by {n}.',
    ),
    clozes=(
        'How does the sentence go on: "{s}"?',
        'Complete from the text: "{s}',
        'Which words follow "{s}" in the text?',
        'What comes after "{s}"?',
    ),
    definitions=(
        "What are the parameters of {f}?",
        "Which arguments does {f} take?",
        "Show the parameters of the function {f}.",
    ),
    acknowledgements=("Thank you.", "I have read it.", "Understood.", "Noted."),
    tool_results=("Result of the tool:", "The tool returned:", "Output:", "File contents:"),
)

TEST = Wording(
    first_names=listed(
        """Amelia, Bernard, Chloe, Dmitri, Esther, Fatima, Gustav, Helena, Ibrahim, Jasmine, Klaus, Lorenzo,
        Margaret, Nikolai,
        Ophelia, Pedro, Ramona, Sven, Theodore, Valerie, Winston, Yolanda, Zachary, Astrid, Benedict, Camille,
        Desmond, Eleanor"""
    ),
    surnames=listed(
        """Andersson, Blackwood, Castillo, Donovan, Eriksen, Fitzgerald, Gonzalez, Harrington, Ivanov, Jefferson,
        Kaufman, Laurent,
        Mendoza, Nguyen, Pemberton, Quigley, Ramirez, Schneider, Thornton, Whitaker"""
    ),
    syllables=listed("bri, cla, dru, fle, gri, plo, sta, tru, wen, yor, hux, jal, quo, shi, tho"),
    things={
        "company": (
            listed("Crystal, Falconer, Zenith, Meridian, Amber, Copper, Vector, Polar, Vista, Onyx"),
            listed("Logistics, Pharma, Insurance, Robotics, Brewery, Cement, Studios, Telecom"),
            " ",
        ),
        "server": (
            listed("node, worker, gateway, storage, relay, metrics"),
            listed("apac-3, apac-8, south-12, prod-14, stage-21, lab-15"),
            "-",
        ),
        "project": (
            listed("Initiative, Programme, Campaign"),
            listed("Jupiter, Lighthouse, Badger, Monsoon, Quartz, Saffron, Tundra"),
            " ",
        ),
        "town": (
            listed("Brack, Cran, Esk, Holm, Ips, Wrex, Yar, Lud"),
            listed("combe, dale, mouth, minster, thorpe, burgh"),
            "",
        ),
        "vessel": (
            listed("the ferry, the yacht, the tanker, the schooner"),
            listed("Aurora, Endeavour, Mermaid, Neptune, Swallow, Victory"),
            " ",
        ),
        "course": (
            listed("Introductory, Advanced, Applied, Practical"),
            listed("Botany, Geometry, Acoustics, Rhetoric, Statistics, Optics"),
            " ",
        ),
        "film": (
            listed("Beyond the, Under the, Return to the, Night at the"),
            listed("Harbour, Castle, Volcano, Station, Desert, Meadow"),
            " ",
        ),
        "component": (
            listed("payment, session, audio, layout, billing"),
            listed("scheduler, validator, renderer, handler, monitor"),
            "_",
        ),
    },
    pools={
        "colour": listed("crimson, turquoise, violet, beige, maroon, olive, ivory, scarlet"),
        "city": listed(
            """Helsinki, Nairobi, Toronto, Bogota, Manila, Zurich, Budapest, Casablanca, Melbourne, Antwerp, Krakow,
            Hamburg"""
        ),
        "job": listed(
            """plumber, architect, dentist, librarian, astronomer, butcher, translator, surgeon, mechanic, conductor"""
        ),
        "object": listed(
            """umbrella, telescope, blanket, compass, violin, suitcase, lantern, trumpet, pillow, bicycle,
            hourglass, magnet,
            scissors, envelope, statue, fountain"""
        ),
        "animal": listed("hamster, canary, donkey, lizard, ferret, peacock, spaniel, tortoise"),
        "food": listed("dumplings, lentils, pancakes, salmon, noodles, mushrooms, yogurt, walnuts"),
        "month": listed("April, July, October, December"),
    },
    value_kinds=("version", "time", "hex", "phone", "measure", "coordinate"),
    qualifiers=listed(
        """regional, monthly, emergency, nominal, printed, revised, annual, verified, estimated, personal, remote,
        initial, northern"""
    ),
    nouns=listed(
        """passcode, voucher, ticket, permit, licence, postcode, membership, dosage, tariff, coupon, altitude,
        voltage, checksum,
        quota, frequency, capacity, mileage, allowance, threshold, pager, dial code, case reference, humidity,
        firmware, shelf"""
    ),
    word_attributes={
        "colour": listed("uniform, banner, ink, livery"),
        "city": listed("terminus, venue, residence, training ground"),
        "job": listed("vocation, former career, calling"),
        "object": listed("talisman, souvenir, logo, heirloom, riddle answer"),
        "animal": listed("companion, heraldic beast, logo animal"),
        "food": listed("supper, snack, export, dessert"),
        "month": listed("renewal month, harvest, audit month"),
    },
    statements=_lines(
        """
        {e} uses {v} for the {a}.
        Remember that {e} goes with {v} when it comes to the {a}.
        The {a} assigned to {e} turned out to be {v}.
        Somebody wrote {v} next to {e} in the column for the {a}.
        Regarding the {a}, {e} settled on {v}.
        In our notes, {v} appears as the {a} of {e}.
        {e} reported a {a} of {v}.
        It is {v} that {e} keeps as {a}.
        Our records list the {a} of {e} at {v}.
        {e} finally confirmed {v} to be the {a}.
        By the way, {e} now shows {v} under {a}.
        The committee fixed the {a} for {e} at {v}.
        """
    ),
    lead_ins=("Reminder - ", "Apparently, ", "From what was announced, ", "Correction: ", "On second thoughts, "),
    tails=(" until further notice", ", according to our guide", " as planned", ", if memory serves"),
    records=_lines(
        """
        {e} :: {a} :: {v}
        {a} / {e} / {v}
        <{e}> {a} => {v}
        NOTICE: {e} updated; {a} := {v}
        [17:42] {e} reports {a} {v}
        ts=1712 src={e} key={A} val={v}
        {{"entity": "{e}", "attr": {{"{A}": "{v}"}}}}
        "{a}"\t"{e}"\t"{v}"
        static final String {E}_{A} = "{v}";
        {E}__{A} := '{v}'
        INSERT INTO facts VALUES ('{e}', '{a}', '{v}');
        Anna> {a} of {e}? Ben> {v}
        {e} . . . {a} . . . {v}
        @{E} {A}: {v}
        """
    ),
    tables=("tsv", "html", "ini"),
    split=(
        ("Somebody mentioned {e} yesterday.", "Apparently {v} is the {a}."),
        ("{e} is next on our agenda.", "For the {a} we noted {v}."),
        ("Everyone was waiting for {e}.", "{v} had been announced as the {a}."),
    ),
    questions=_lines(
        """
        What do the records give as the {a} of {e}?
        I forgot {e}'s {a}; what was it again?
        Under which {a} is {e} listed?
        Would you let me know the {a} assigned to {e}?
        Regarding {e}: what {a} is mentioned?
        Kindly state the {a} of {e}.
        Could you check which {a} {e} has got?
        Name the {a} {e} uses.
        What would I enter as the {a} for {e}?
        From the material above, extract the {a} of {e}.
        """
    ),
    keywords=_lines(
        """
        need {a} - {e}
        {e} / {a}
        search: {e} {a}
        {a}, {e}, please
        """
    ),
    subject_questions=_lines(
        """
        Who or what is listed with the {a} {v}?
        Name the holder of the {a} {v}.
        For which entry does the {a} equal {v}?
        """
    ),
    several_questions=_lines(
        """
        Collect each {a} recorded for {e}.
        {e} has several entries under {a}; name them.
        """
    ),
    openers=("", "", "Hi there, ", "Sorry to bother you. ", "Next: ", "By the way, ", "I have a request. "),
    instructions=(
        "",
        "",
        " No explanation, please.",
        " One short answer is enough.",
        " Respond with nothing else.",
        "\n\nResponse:",
    ),
    sentence_instructions=(" Cite the passage.", " Reproduce the exact line."),
    before=_lines(
        """
        Using the material underneath, tell me: {q}
        My request: {q} Material:
        {q} (see below)
        """
    ),
    relations=(
        Relation(
            "person",
            "city",
            ("{e} settled in {v}.", "{e} made a home in {v}."),
            ("What place is {e}'s home?", "Where did {e} settle?"),
            ("Which person settled in {v}?",),
        ),
        Relation(
            "person",
            "object",
            ("{e} repaired the {v}.", "{e} managed to mend the {v}."),
            ("Which thing was repaired by {e}?", "What did {e} repair?"),
            ("Which person repaired the {v}?",),
        ),
        Relation(
            "person",
            "person",
            ("{e} taught {v}.", "{e} was the teacher of {v}."),
            ("Whom did {e} teach?", "Name the pupil of {e}."),
            ("Name the teacher of {v}.",),
        ),
        Relation(
            "vessel",
            "city",
            ("{e} sailed for {v}.", "{e} set course for {v}."),
            ("For which port did {e} sail?", "Where was {e} heading?"),
            ("Which ship sailed for {v}?",),
        ),
        Relation(
            "vessel",
            "person",
            ("{v} is the captain of {e}.", "{e} is commanded by {v}."),
            ("Name the captain of {e}.", "Who commands {e}?"),
            ("Which ship does {v} command?",),
        ),
        Relation(
            "course",
            "person",
            ("{v} lectures on {e}.", "{e} is given by {v}."),
            ("Which lecturer gives {e}?", "Who lectures on {e}?"),
            ("Name the course that {v} gives.",),
        ),
        Relation(
            "film",
            "person",
            ("{e} was directed by {v}.", "{v} directed {e}."),
            ("Name the director of {e}.", "Who directed {e}?"),
            ("Which film did {v} direct?",),
        ),
        Relation(
            "company",
            "food",
            ("{e} exports {v}.", "{e} ships {v} abroad."),
            ("Which goods does {e} export?", "What is exported by {e}?"),
            ("Which firm exports {v}?",),
        ),
        Relation(
            "town",
            "animal",
            ("{e} is famous for its {v}.", "The {v} is the pride of {e}."),
            ("For which animal is {e} famous?",),
            ("Which town is famous for its {v}?",),
        ),
    ),
    chains=(
        ("Assign {v} to {x}.", "Assign {x} to {y}.", "Determine {x}."),
        ("{x} := {v}", "{y} := {x}", "What number does {x} hold?"),
    ),
    counts=(("{e} sneezed.", "Count how often {e} sneezed."), ("timeout at {e}", "Count the timeouts at {e}.")),
    commons=(
        ("Items: {list}.", "Name the item that appears most."),
        ("Labels = {list}", "What label is the most frequent?"),
    ),
    moves=("{p} journeyed to the {l}.", "{p} headed for the {l}.", "{p} entered the {l}."),
    takes=("{p} grabbed the {o}.", "{p} got hold of the {o}."),
    where=("At what place can {p} be found?", "Name the current place of {p}."),
    carries=("Which person holds the {o}?", "Name the one with the {o}."),
    copies=('Reproduce the text starting from "{s}".', 'Type the sentence opening with "{s}" again.'),
    edits=('Reproduce the text starting from "{s}" with {n} in place of {o}.',),
    clozes=('Continue the quotation: "{s}', 'After the words "{s}", what does the author write?'),
    definitions=("List the inputs of {f}.", "With which arguments is {f} declared?"),
    acknowledgements=("Got it.", "All right, I have it.", "Received."),
    tool_results=("Tool response:", "Search hits:", "Command printed:"),
)

WORDINGS = {"train": TRAIN, "test": TEST}
PLACES = {
    "train": listed("kitchen, garden, hall, bathroom, office, bedroom, cellar, attic, garage, school"),
    "test": listed("pantry, balcony, stable, library, chapel, courtyard, laundry, studio"),
}
