//! The word lists of the chat tasks.
//!
//! DO NOT CHANGE: the bundled demo model was trained on exactly these words and wordings.

pub(super) const NAMES: [&str; 30] = [
    "Ada", "Bruno", "Chloe", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Luis",
    "Mona", "Nils", "Olga", "Pedro", "Quinn", "Rosa", "Sven", "Tara", "Umar", "Vera", "Wanda", "Ximena",
    "Yusuf", "Zoe", "Anton", "Beata", "Carlos", "Dora",
];

pub(super) const ADJECTIVES: [&str; 48] = [
    "amber", "brave", "calm", "deep", "eager", "fancy", "gentle", "happy", "icy", "jolly", "keen", "lucky",
    "mellow", "noble", "odd", "plain", "quick", "rapid", "sharp", "tender", "upset", "vivid", "warm",
    "young", "zesty", "bright", "cold", "dusty", "empty", "fresh", "grand", "hollow", "iron", "jagged",
    "kind", "loud", "misty", "narrow", "old", "pale", "quiet", "rough", "silent", "tall", "urban", "vast",
    "wild", "yellow",
];

pub(super) const NOUNS: [&str; 47] = [
    "anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket",
    "kettle", "lantern", "mirror", "needle", "orchard", "palace", "quarry", "river", "saddle", "temple",
    "uniform", "valley", "window", "yacht", "zebra", "apple", "basket", "castle", "dragon", "eagle",
    "falcon", "glacier", "hammer", "insect", "jungle", "knight", "ladder", "magnet", "notebook", "ocean",
    "pencil", "rabbit", "shelter", "tunnel", "umbrella", "village", "whistle",
];

pub(super) const CITIES: [&str; 20] = [
    "Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Perth", "Turin", "Kyoto", "Dakar", "Sofia",
    "Minsk", "Accra", "Bergen", "Leeds", "Porto", "Basel", "Natal", "Osaka", "Tunis",
];

pub(super) const FOODS: [&str; 15] = [
    "noodles",
    "olives",
    "pancakes",
    "mangoes",
    "lentils",
    "dumplings",
    "cherries",
    "walnuts",
    "risotto",
    "tacos",
    "pickles",
    "waffles",
    "figs",
    "oysters",
    "plums",
];

pub(super) const PETS: [&str; 10] =
    ["cat", "dog", "parrot", "turtle", "rabbit", "goldfish", "hamster", "lizard", "pony", "ferret"];

pub(super) const JOBS: [&str; 12] = [
    "baker", "pilot", "teacher", "nurse", "sailor", "tailor", "chemist", "farmer", "painter", "judge",
    "plumber", "dancer",
];

pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// Greetings, and the answer to each group of them.
pub(super) const GREETINGS: [(&[&str], &str); 4] = [
    (
        &["Hi", "Hello", "Hey there", "Hello!", "Hi!", "Good morning"],
        "Hello! I am a tiny demo model. I can find facts in long texts, follow simple programs, add numbers and remember what you tell me.",
    ),
    (
        &["Who are you?", "What are you?", "What is your name?", "Introduce yourself."],
        "I am a small language model with fifteen million weights, trained to read long texts and remember what they say.",
    ),
    (
        &["What can you do?", "Help", "How can you help me?"],
        "Hide a magic number in a long text and ask me for it, give me numbers to add, a list to repeat or sort, or a short program to run.",
    ),
    (&["Thank you", "Thanks!", "Bye", "Goodbye"], "You are welcome. Goodbye!"),
];
