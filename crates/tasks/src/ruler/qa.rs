//! Questions over documents: SQuAD (`qa_1`) and HotpotQA (`qa_2`), from JSON that the caller
//! supplies.
//!
//! Invariant: a [`QaSet`] has at least one question, and every question names documents of the set.

use super::Draft;
use crate::{Random, TaskError};
use serde::Deserialize;
use std::collections::{BTreeSet, HashMap};

const INSTRUCTION: &str = "Answer the question based on the given documents. Only give me the answer and do not output any other words.";
const ANSWER_PREFIX: &str = " Answer:";

/// One question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    pub query: String,
    /// Any of them is right.
    pub answers: Vec<String>,
    /// Documents that must be shown.
    pub gold: Vec<usize>,
    /// Documents on the same subject, shown before unrelated ones.
    pub related: Vec<usize>,
}

/// Questions and the documents they are asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QaSet {
    questions: Vec<Question>,
    documents: Vec<String>,
}

#[derive(Deserialize)]
struct SquadFile {
    data: Vec<SquadArticle>,
}
#[derive(Deserialize)]
struct SquadArticle {
    paragraphs: Vec<SquadParagraph>,
}
#[derive(Deserialize)]
struct SquadParagraph {
    context: String,
    qas: Vec<SquadQuestion>,
}
#[derive(Deserialize)]
struct SquadQuestion {
    question: String,
    #[serde(default)]
    is_impossible: bool,
    answers: Vec<SquadAnswer>,
}
#[derive(Deserialize)]
struct SquadAnswer {
    text: String,
}
#[derive(Deserialize)]
struct HotpotQuestion {
    question: String,
    answer: String,
    context: Vec<(String, Vec<String>)>,
}

/// Documents without repeats, in sorted order, and where each one stands.
fn catalogue(texts: impl Iterator<Item = String>) -> (Vec<String>, HashMap<String, usize>) {
    let documents: Vec<String> = texts.collect::<BTreeSet<_>>().into_iter().collect();
    let places = documents.iter().enumerate().map(|(i, text)| (text.clone(), i)).collect();
    (documents, places)
}

impl QaSet {
    /// Reads SQuAD's format (the official run uses dev-v2.0); unanswerable questions are left out.
    pub fn squad(json: &str) -> Result<Self, TaskError> {
        const FORMAT: &str = "SQuAD";
        let file: SquadFile = serde_json::from_str(json).map_err(|source| TaskError::QuestionFormat {
            format: FORMAT,
            expected: "an object with `data`, articles with `paragraphs`, each with `context` and `qas`",
            source,
        })?;
        let paragraphs = file.data.iter().flat_map(|article| &article.paragraphs);
        let (documents, places) = catalogue(paragraphs.map(|paragraph| paragraph.context.clone()));
        let mut questions = Vec::new();
        for article in file.data {
            let of_article: BTreeSet<usize> =
                article.paragraphs.iter().map(|paragraph| places[&paragraph.context]).collect();
            for paragraph in article.paragraphs {
                let gold = places[&paragraph.context];
                for asked in paragraph.qas {
                    if asked.is_impossible || asked.answers.is_empty() {
                        continue;
                    }
                    questions.push(Question {
                        query: asked.question,
                        answers: asked.answers.into_iter().map(|answer| answer.text).collect(),
                        gold: vec![gold],
                        related: of_article.iter().copied().filter(|&place| place != gold).collect(),
                    });
                }
            }
        }
        Self::checked(FORMAT, questions, documents)
    }

    /// Reads HotpotQA's format (the official run uses dev distractor v1).
    pub fn hotpotqa(json: &str) -> Result<Self, TaskError> {
        const FORMAT: &str = "HotpotQA";
        let items: Vec<HotpotQuestion> =
            serde_json::from_str(json).map_err(|source| TaskError::QuestionFormat {
                format: FORMAT,
                expected: "a list of objects with `question`, `answer` and `context` of [title, sentences] pairs",
                source,
            })?;
        let write = |(title, sentences): &(String, Vec<String>)| format!("{title}\n{}", sentences.concat());
        let (documents, places) = catalogue(items.iter().flat_map(|item| &item.context).map(write));
        let questions = items
            .into_iter()
            .filter(|item| !item.context.is_empty())
            .map(|item| {
                let gold: BTreeSet<usize> = item.context.iter().map(|pair| places[&write(pair)]).collect();
                Question {
                    query: item.question,
                    answers: vec![item.answer],
                    gold: gold.into_iter().collect(),
                    related: Vec::new(),
                }
            })
            .collect();
        Self::checked(FORMAT, questions, documents)
    }

    fn checked(
        format: &'static str,
        questions: Vec<Question>,
        documents: Vec<String>,
    ) -> Result<Self, TaskError> {
        if questions.is_empty() {
            return Err(TaskError::NoQuestions { format });
        }
        Ok(Self { questions, documents })
    }

    pub fn questions(&self) -> &[Question] {
        &self.questions
    }

    pub fn documents(&self) -> &[String] {
        &self.documents
    }
}

/// A case except its size: all documents in the order in which they are added.
pub(super) struct Plan<'a> {
    question: &'a Question,
    documents: &'a [String],
    order: Vec<usize>,
    random: Random,
}

impl<'a> Plan<'a> {
    /// `None` when the set has no question `index`.
    pub fn draw(set: &'a QaSet, index: usize, mut random: Random) -> Option<Self> {
        let question = set.questions.get(index)?;
        let mut related = question.related.clone();
        random.shuffle(&mut related);
        let mut order = question.gold.clone();
        order.extend(related);
        let shown: BTreeSet<usize> = order.iter().copied().collect();
        let mut others: Vec<usize> =
            (0..set.documents.len()).filter(|place| !shown.contains(place)).collect();
        random.shuffle(&mut others);
        order.extend(others);
        Some(Self { question, documents: &set.documents, order, random })
    }

    pub fn gold_documents(&self) -> usize {
        self.question.gold.len()
    }

    pub fn compose(&self, size: usize) -> Draft {
        let mut places = self.order[..size.min(self.order.len())].to_vec();
        self.random.clone().shuffle(&mut places);
        let mut context = String::new();
        let mut starts = Vec::new();
        for (i, &place) in places.iter().enumerate() {
            if i > 0 {
                context.push_str("\n\n");
            }
            if self.question.gold.contains(&place) {
                starts.push(context.len());
            }
            context.push_str(&format!("Document {}:\n{}", i + 1, self.documents[place]));
        }
        Draft {
            depths: starts.into_iter().map(|start| start as f64 / context.len().max(1) as f64).collect(),
            prompt: format!(
                "{INSTRUCTION}\n\nThe following are given documents.\n\n{context}\n\n{INSTRUCTION}\n\nQuestion: {}",
                self.question.query
            ),
            answer_prefix: ANSWER_PREFIX.to_owned(),
            references: self.question.answers.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_files_are_explained() {
        let message = |result: Result<QaSet, TaskError>| result.unwrap_err().to_string();
        assert!(message(QaSet::squad("{]")).contains("not a SQuAD question set"));
        assert!(message(QaSet::squad("[1, 2]")).contains("an object with `data`"));
        assert!(message(QaSet::hotpotqa("{\"data\": []}")).contains("a list of objects with `question`"));
        assert!(message(QaSet::squad("{\"data\": []}")).contains("no answerable question"));
        assert!(message(QaSet::hotpotqa("[]")).contains("no answerable question"));
    }
}
