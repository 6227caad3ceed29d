//! RULER cases against their definitions: budget, needles, chains, counts, questions.

use oscar_tasks::{
    Filler, GrammarFiller, Metric, ParagraphFiller, QaSet, Random, RulerCase, RulerConfig, RulerGenerator,
    RulerTask, TaskError,
};
use std::collections::{HashMap, HashSet};

/// A stand-in tokenizer: a token for every four letters of a word, for every digit, for every mark.
fn count_tokens(text: &str) -> usize {
    let (mut tokens, mut letters) = (0, 0);
    for c in text.chars() {
        if c.is_alphabetic() {
            tokens += usize::from(letters % 4 == 0);
            letters += 1;
        } else {
            letters = 0;
            tokens += usize::from(!c.is_whitespace() || c == '\n');
        }
    }
    tokens
}

fn generator(max_seq_length: usize) -> RulerGenerator<'static> {
    RulerGenerator::new(RulerConfig::new(max_seq_length), &GrammarFiller, &count_tokens)
        .with_qa_1(QaSet::squad(&squad_json()).unwrap())
        .with_qa_2(QaSet::hotpotqa(&hotpot_json()).unwrap())
}

fn made_up_paragraph(i: u64) -> String {
    GrammarFiller.paragraph(&mut Random::new("documents", i, 0)).replace('"', "'")
}

fn squad_json() -> String {
    let articles: Vec<String> = (0..6)
        .map(|a| {
            let paragraphs: Vec<String> = (0..30)
                .map(|p| {
                    let text = made_up_paragraph(a * 100 + p);
                    format!(
                        r#"{{"context": "The code of hall {a}-{p} is K{a}X{p}Z. {text}", "qas": [
                            {{"question": "What is the code of hall {a}-{p}?", "id": "x", "is_impossible": false,
                              "answers": [{{"text": "K{a}X{p}Z", "answer_start": 0}}, {{"text": "code K{a}X{p}Z", "answer_start": 0}}]}},
                            {{"question": "Impossible?", "is_impossible": true, "answers": []}}]}}"#
                    )
                })
                .collect();
            format!(r#"{{"title": "Article {a}", "paragraphs": [{}]}}"#, paragraphs.join(","))
        })
        .collect();
    format!(r#"{{"version": "v2.0", "data": [{}]}}"#, articles.join(","))
}

fn hotpot_json() -> String {
    let items: Vec<String> = (0..40)
        .map(|q| {
            let context: Vec<String> = (0..3)
                .map(|d| format!(r#"["Title {q} {d}", ["Fact {q} {d}. ", "{}"]]"#, made_up_paragraph(q * 10 + d)))
                .collect();
            format!(
                r#"{{"_id": "a", "question": "Which fact is number {q}?", "answer": "Fact {q}", "context": [{}], "supporting_facts": []}}"#,
                context.join(",")
            )
        })
        .collect();
    format!("[{}]", items.join(","))
}

fn cost(case: &RulerCase) -> usize {
    count_tokens(&format!("{}{}", case.prompt, case.answer_prefix)) + case.tokens_to_generate
}

fn context(case: &RulerCase) -> &str {
    let (_, rest) = case.prompt.split_once("afterwards.\n").unwrap();
    rest.rsplit_once('\n').unwrap().0
}

#[test]
fn budgets_are_kept_and_nearly_used() {
    for length in [2048, 4096, 16_384] {
        let generator = generator(length);
        for task in RulerTask::all() {
            for index in 0..3 {
                let case = generator.case(task, index).unwrap();
                let used = cost(&case);
                assert!(used <= length, "{} at {length}: {used}", task.name());
                // The widest unit: a document of a question, a line of two uuids, a line, some word
                // entries.
                let unit = match task {
                    RulerTask::Qa1 | RulerTask::Qa2 => 400,
                    RulerTask::NiahMultikey3 => 110,
                    _ => 60,
                };
                assert!(length - used <= unit + length / 512, "{} at {length}: {used}", task.name());
                assert_eq!((case.task, case.index), (task, index));
                assert_eq!(
                    (case.tokens_to_generate, case.metric),
                    (task.tokens_to_generate(), task.metric())
                );
            }
        }
    }
}

#[test]
fn the_reserve_counts() {
    let config = RulerConfig { reserved_tokens: 300, ..RulerConfig::new(4096) };
    let generator = RulerGenerator::new(config, &GrammarFiller, &count_tokens);
    for task in RulerTask::without_data() {
        assert!(cost(&generator.case(task, 0).unwrap()) + 300 <= 4096);
    }
}

#[test]
fn cases_depend_on_seed_and_index_alone() {
    let (first, second) = (generator(2048), generator(2048));
    let reseeded = RulerConfig { seed: 43, ..RulerConfig::new(2048) };
    let other = RulerGenerator::new(reseeded, &GrammarFiller, &count_tokens);
    for task in RulerTask::without_data() {
        // Asked for in another order.
        let later = second.case(task, 1).unwrap();
        assert_eq!(first.case(task, 0).unwrap(), second.case(task, 0).unwrap());
        assert_eq!(first.case(task, 1).unwrap(), later);
        assert_ne!(first.case(task, 0).unwrap().prompt, later.prompt);
        assert_ne!(other.case(task, 1).unwrap().references, later.references);
    }
}

#[test]
fn needles_occur_once_at_the_recorded_depth() {
    let generator = generator(4096);
    for task in &RulerTask::all()[..8] {
        for index in 0..12 {
            let case = generator.case(*task, index).unwrap();
            let context = context(&case);
            let answers =
                if matches!(task, RulerTask::NiahMultivalue | RulerTask::NiahMultiquery) { 4 } else { 1 };
            assert_eq!((case.references.len(), case.depths.len()), (answers, answers));
            for (value, depth) in case.references.iter().zip(&case.depths) {
                assert_eq!(case.prompt.matches(value.as_str()).count(), 1, "{}", task.name());
                let start = (depth * context.len() as f64).round() as usize;
                let needle = &context[start..];
                assert!(
                    needle.starts_with("One of the special magic "),
                    "{}: {}",
                    task.name(),
                    &needle[..40]
                );
                assert_eq!(needle.split_once(" is: ").unwrap().1[..value.len()], **value);
            }
            let needles = context.matches("One of the special magic ").count();
            match task {
                RulerTask::NiahMultikey1 => assert_eq!(needles, 4),
                RulerTask::NiahMultikey2 | RulerTask::NiahMultikey3 => assert!(needles > 40),
                _ => assert_eq!(needles, answers),
            }
        }
    }
}

#[test]
fn keys_are_distinct_and_depths_spread() {
    let generator = generator(8192);
    let case = generator.case(RulerTask::NiahMultikey2, 0).unwrap();
    let keys: Vec<&str> = context(&case)
        .lines()
        .map(|line| line.split_once(" for ").unwrap().1.split_once(" is: ").unwrap().0)
        .collect();
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());

    let mut thirds = [0; 3];
    for index in 0..60 {
        let depth = generator.case(RulerTask::NiahSingle2, index).unwrap().depths[0];
        thirds[((depth * 3.0) as usize).min(2)] += 1;
    }
    assert!(thirds.iter().all(|&n| n >= 8), "{thirds:?}");
}

#[test]
fn needles_stand_at_the_depths_asked_for() {
    let percents = [5, 25, 50, 75, 95];
    for length in [1024, 4096] {
        let cases = generator(length).needles_at(&percents, 1).unwrap();
        assert_eq!(cases, generator(length).needles_at(&percents, 1).unwrap());
        assert_ne!(cases[0].references, generator(length).needles_at(&percents, 2).unwrap()[0].references);
        assert_eq!(cases.len(), percents.len());
        for (case, percent) in cases.iter().zip(percents) {
            assert!(cost(case) <= length && length - cost(case) < 60, "{}", cost(case));
            assert_eq!((case.references.len(), case.depths.len()), (1, 1));
            assert!((case.depths[0] - percent as f64 / 100.0).abs() < 0.08, "{:?} at {percent}", case.depths);
            assert_eq!(case.prompt.matches(case.references[0].as_str()).count(), 1);
            assert_eq!(context(case), context(&cases[0]), "only the question differs");
            let (_, question) = case.prompt.rsplit_once('\n').unwrap();
            let key = question.strip_prefix("What is the special magic number for ").unwrap();
            let key = key.strip_suffix(" mentioned in the provided text?").unwrap();
            assert!(case.prompt.contains(&format!("numbers for {key} is: {}.", case.references[0])));
        }
    }
    let single = generator(2048).needles_at(&[40], 0).unwrap();
    assert_eq!((single.len(), single[0].task), (1, RulerTask::NiahSingle2));
    assert_eq!(context(&single[0]).matches("One of the special magic ").count(), 1);
}

#[test]
fn wordings_are_official() {
    let generator = generator(2048);
    let one = generator.case(RulerTask::NiahSingle1, 0).unwrap();
    assert!(one.prompt.starts_with("A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number afterwards.\nThe grass is green."));
    let (_, question) = one.prompt.rsplit_once('\n').unwrap();
    let key = question.strip_prefix("What is the special magic number for ").unwrap();
    let key = key.strip_suffix(" mentioned in the provided text?").unwrap();
    assert_eq!(
        one.answer_prefix,
        format!(" The special magic number for {key} mentioned in the provided text is")
    );
    assert!(
        one.prompt
            .contains(&format!("One of the special magic numbers for {key} is: {}.", one.references[0]))
    );

    let many = generator.case(RulerTask::NiahMultiquery, 0).unwrap();
    assert!(many.prompt.starts_with("Some special magic numbers are hidden within the following text."));
    let (_, question) = many.prompt.rsplit_once('\n').unwrap();
    assert!(
        question.starts_with("What are all the special magic numbers for ") && question.contains(", and ")
    );
    assert!(many.answer_prefix.ends_with(" mentioned in the provided text are"));
    assert_eq!(generator.case(RulerTask::NiahSingle3, 0).unwrap().references[0].len(), 36);
}

#[test]
fn chains_are_consistent() {
    let generator = generator(4096);
    for index in 0..20 {
        let case = generator.case(RulerTask::Vt, index).unwrap();
        assert_eq!(case.prompt.matches("Memorize and track the chain(s)").count(), 2, "one worked example");
        let (example, asked) = case.prompt.split_once("\n\nMemorize").unwrap();
        assert!(count_tokens(example) <= 500 + 20);
        let trace = |text: &str| {
            let (context, question) = text.split_once("Question: ").unwrap();
            let value = question.split_once("the value ").unwrap().1.split(' ').next().unwrap();
            let mut names: Vec<String> = Vec::new();
            for line in context.lines().filter_map(|line| line.strip_prefix("VAR ")) {
                let (name, source) = line.trim_end().split_once(" = ").unwrap();
                let known = source.strip_prefix("VAR ").is_some_and(|from| names.contains(&from.to_owned()));
                assert!(source == value || known, "assigned before use");
                names.push(name.to_owned());
            }
            (value.to_owned(), names)
        };
        let (value, names) = trace(asked);
        assert_eq!((names.len(), &names), (5, &case.references));
        assert!(names.iter().all(|name| name.len() == 5));
        assert_eq!(
            case.answer_prefix,
            format!(
                " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
            )
        );
        let (_, shown) = trace(example);
        assert!(example.ends_with(&format!("they are:  {}", shown.join(" "))) && shown[0].len() == 3);
        assert!(case.depths.windows(2).all(|pair| pair[0] < pair[1]) && case.depths.len() == 5);
    }
}

fn list_counts(case: &RulerCase) -> HashMap<&str, usize> {
    let lines: Vec<&str> = case.prompt.lines().filter(|line| line.starts_with("1. ")).collect();
    let mut counts = HashMap::new();
    for (i, pair) in lines.last().unwrap().split(' ').collect::<Vec<_>>().chunks(2).enumerate() {
        assert_eq!(pair[0], format!("{}.", i + 1));
        *counts.entry(pair[1]).or_default() += 1;
    }
    counts
}

#[test]
fn common_words_are_counted_right() {
    for (length, common, uncommon) in [(2048, 6, 1), (4096, 30, 3), (32_768, 30, 3)] {
        let generator = generator(length);
        for index in 0..3 {
            let case = generator.case(RulerTask::Cwe, index).unwrap();
            let counts = list_counts(&case);
            assert_eq!(case.references.len(), 10);
            for (word, count) in counts {
                let expected =
                    if case.references.iter().any(|answer| answer == word) { common } else { uncommon };
                assert_eq!(count, expected, "{word}");
            }
            assert_eq!(case.prompt.matches("Below is a numbered list of words.").count(), 2);
            assert!(case.prompt.contains("appear most often in the list are: 1. "));
            assert!(case.depths.is_empty());
        }
    }
}

#[test]
fn long_word_lists_take_compounds() {
    let case = generator(65_536).case(RulerTask::Cwe, 0).unwrap();
    assert!(list_counts(&case).len() > 1500);
    assert!(65_536 - cost(&case) < 300);
}

#[test]
fn frequent_words_follow_the_zeta_law() {
    for length in [1024, 8192] {
        let case = generator(length).case(RulerTask::Fwe, 0).unwrap();
        let text = case.prompt.split_once("coded words. ").unwrap().1.split_once('\n').unwrap().0;
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for word in text.split(' ') {
            assert!(word == "..." || (word.len() == 6 && word.chars().all(|c| c.is_ascii_lowercase())));
            *counts.entry(word).or_default() += 1;
        }
        let noise = counts["..."];
        let mut ranked: Vec<(usize, &str)> = counts.into_iter().map(|(word, count)| (count, word)).collect();
        ranked.sort_unstable_by(|a, b| b.cmp(a));
        let top: HashSet<&str> = ranked[1..4].iter().map(|&(_, word)| word).collect();
        assert_eq!(top, case.references.iter().map(String::as_str).collect());
        assert!(ranked[3].0 > ranked.get(4).map_or(0, |word| word.0), "the third answer leads");
        for (rank, &(count, _)) in (1..).zip(&ranked).take(6) {
            // floor(n / rank^2) of the same n for all ranks, give or take the rounding of the
            // first.
            assert!((noise / (rank * rank)).abs_diff(count) <= 1, "rank {rank}: {count} of {noise}");
        }
        assert!(ranked.len() < length / 50);
    }
}

#[test]
fn questions_show_their_documents() {
    let generator = generator(4096);
    for index in [0, 7, 150] {
        let case = generator.case(RulerTask::Qa1, index).unwrap();
        assert!(case.prompt.starts_with("Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\nThe following are given documents.\n\nDocument 1:\n"));
        assert!(case.prompt.contains("\n\nDocument 2:\n") && case.answer_prefix == " Answer:");
        assert_eq!((case.references.len(), case.depths.len()), (2, 1));
        assert_eq!(case.prompt.matches(&format!("is {}.", case.references[0])).count(), 1);
        assert_eq!(case.score(&format!(" {}", case.references[0])), 1.0);
        assert_eq!(case.score("unknown"), 0.0);
    }
    let case = generator.case(RulerTask::Qa2, 5).unwrap();
    assert!(case.prompt.ends_with("\n\nQuestion: Which fact is number 5?"));
    assert_eq!(case.depths.len(), 3);
    for document in 0..3 {
        assert!(case.prompt.contains(&format!("Title 5 {document}\nFact 5 {document}. ")));
    }
    let small = QaSet::hotpotqa(&hotpot_json()).unwrap();
    assert_eq!((small.questions().len(), small.documents().len()), (40, 120));
}

#[test]
fn hand_made_predictions_are_scored() {
    let case = generator(2048).case(RulerTask::NiahMultivalue, 0).unwrap();
    assert_eq!(case.metric, Metric::StringMatchAll);
    assert_eq!(case.score(&case.references.join(", ")), 1.0);
    assert_eq!(case.score(&format!("{} and {}", case.references[3], case.references[1])), 0.5);
    assert_eq!(case.score("no idea"), 0.0);
}

#[test]
fn impossible_wishes_are_explained() {
    let bare = RulerGenerator::new(RulerConfig::new(4096), &GrammarFiller, &count_tokens);
    assert!(bare.case(RulerTask::Qa1, 0).unwrap_err().to_string().contains("SQuAD"));
    assert!(bare.case(RulerTask::Qa2, 0).unwrap_err().to_string().contains("HotpotQA"));
    let full = generator(4096);
    let error = full.case(RulerTask::Qa2, 40).unwrap_err();
    assert!(matches!(error, TaskError::QuestionsExhausted { available: 40, .. }), "{error}");
    for length in [0, 1, 100, 160] {
        for task in RulerTask::all() {
            match generator(length).case(task, 0) {
                Ok(case) => assert!(cost(&case) <= length),
                Err(error) => assert!(matches!(error, TaskError::ContextTooShort { .. }), "{error}"),
            }
        }
    }
    let error = RulerTask::parse("niah").unwrap_err().to_string();
    assert!(error.contains("niah_single_1, ") && error.contains("qa_2"), "{error}");
}

#[test]
fn a_short_essay_of_the_caller_is_repeated() {
    let filler = ParagraphFiller::from_text("Only this. And then that.\n\nNothing more.").unwrap();
    let generator = RulerGenerator::new(RulerConfig::new(2048), &filler, &count_tokens);
    let case = generator.case(RulerTask::NiahSingle2, 0).unwrap();
    assert!(case.prompt.matches("Only this. ").count() > 20);
    assert!(2048 - cost(&case) < 20);
}

#[test]
fn a_counter_that_counts_nothing_does_not_hang() {
    let generator = RulerGenerator::new(RulerConfig::new(600), &GrammarFiller, &|_| 0);
    for task in RulerTask::without_data() {
        assert!(generator.case(task, 0).is_ok());
    }
}
