//! The field `kv` of a chat request: which rows of the cache the conversation keeps.

use oscar_engine::{Budget, Eviction, KvRequest, Turn};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::ops::Range;

use super::template::Printed;
use crate::app::App;
use crate::error::ApiError;
use crate::schema::shown;

/// The field, checked.
#[derive(Debug, Default, PartialEq)]
pub struct KvFields {
    budget: Option<Budget>,
    evict: Option<Eviction>,
    whole: bool,
    protect: Protect,
}

/// Messages that are never evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Protect {
    system: bool,
    /// Descriptions of tools.
    tools: bool,
    /// What tools answered. Not by default: an agent's results would outgrow any budget.
    results: bool,
    messages: BTreeSet<usize>,
}

impl Default for Protect {
    fn default() -> Self {
        Self { system: true, tools: true, results: false, messages: BTreeSet::new() }
    }
}

/// Separate protected parts of a prompt at most: each compaction looks rows up among them.
const MOST_PARTS: usize = 256;

impl KvFields {
    pub fn read(fields: Option<&Map<String, Value>>) -> Result<Self, ApiError> {
        let mut kv = Self::default();
        for (name, value) in fields.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
            match name.as_str() {
                "budget" => kv.budget = Some(budget(value)?),
                "evict" => kv.evict = evict(value)?,
                "view" => match value.as_str() {
                    Some("auto") => {}
                    Some("none") => kv.whole = true,
                    _ => return Err(wrong("view", "auto or none", value)),
                },
                "protect" => kv.protect = protect(value)?,
                other => {
                    let problem =
                        format!("has no field {other:?}: known are budget, evict, protect and view");
                    return Err(ApiError::param("kv", problem));
                }
            }
        }
        // `"evict": "none"` asks for the whole history too.
        let none = fields.and_then(|fields| fields.get("evict")).is_some_and(|evict| evict == "none");
        kv.whole |= none;
        Ok(kv)
    }

    /// What the engine is asked for, with the positions of the protected messages if rows may be evicted.
    pub fn request(
        self,
        app: &App,
        prompt: &str,
        messages: &[Printed],
        add_special: bool,
    ) -> Result<KvRequest, ApiError> {
        let Self { budget, evict, whole, protect } = self;
        let own = messages.iter().filter(|message| message.role.is_some()).count();
        if let Some(index) = protect.messages.iter().find(|&&index| index >= own) {
            let problem = format!("there is no message {index}: the conversation has {own}");
            return Err(ApiError::param("kv.protect", problem));
        }
        let info = app.engine.info();
        let capped = budget.is_some() || info.row_cap.is_some();
        let (mut protected, mut turn) = (Vec::new(), None);
        if capped && !whole {
            let found = found(prompt, messages);
            let bytes = protect.bytes(prompt, messages, &found);
            let keeps_base = evict.map_or(info.keeps_base, Eviction::keeps_base);
            if bytes.len() > MOST_PARTS {
                let problem = format!(
                    "{} separate parts of the prompt are more than the {MOST_PARTS} that can be protected: \
                     protect neighbouring messages",
                    bytes.len()
                );
                return Err(ApiError::param("kv.protect", problem));
            }
            if keeps_base || !bytes.is_empty() {
                let offsets = app.text.tokenizer.offsets(prompt, add_special);
                let offsets = offsets.map_err(|error| ApiError::text("messages", &error))?;
                protected = bytes.iter().map(|bytes| tokens_of(&offsets, bytes)).collect();
                if let Some((text, before)) = last_turn(messages, &found).filter(|_| keeps_base) {
                    let utterances: Vec<_> = before.iter().map(|bytes| tokens_of(&offsets, bytes)).collect();
                    let question = app.text.tokenizer.encode(text, false);
                    let question = question.map_err(|error| ApiError::text("messages", &error))?;
                    let start = utterances.last().map_or(0, |last| last.end);
                    turn = Some(Turn { start, utterances, question });
                }
            }
        }
        Ok(KvRequest { budget, evict, whole, protected, turn })
    }
}

/// Where the texts of the messages stand in the prompt, as far as the template printed them unchanged.
fn found(prompt: &str, messages: &[Printed]) -> Vec<Option<Range<usize>>> {
    let mut at = 0;
    messages
        .iter()
        .map(|message| {
            let text = message.content.trim();
            let start = at + prompt[at..].find(text).filter(|_| !text.is_empty())?;
            at = start + text.len();
            Some(start..at)
        })
        .collect()
}

/// The text of the last message of the user, and the parts of the prompt before it: each reaches from
/// the end of one message to the end of the next, so that roles and separators belong to some part.
fn last_turn<'a>(
    messages: &'a [Printed],
    found: &[Option<Range<usize>>],
) -> Option<(&'a str, Vec<Range<usize>>)> {
    let last = messages.iter().rposition(|message| message.role.as_deref() == Some("user"))?;
    found[last].as_ref()?;
    let mut at = 0;
    let parts = found[..last].iter().flatten().map(|text| {
        let part = at..text.end;
        at = text.end;
        part
    });
    Some((messages[last].content.trim(), parts.collect()))
}

fn wrong(field: &str, allowed: &str, value: &Value) -> ApiError {
    ApiError::param(format!("kv.{field}"), format!("must be {allowed}, not {}", shown(value)))
}

fn budget(value: &Value) -> Result<Budget, ApiError> {
    let text = match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        other => return Err(wrong("budget", "rows (2048) or bytes (\"64M\")", other)),
    };
    text.parse().map_err(|error| ApiError::param("kv.budget", error))
}

fn evict(value: &Value) -> Result<Option<Eviction>, ApiError> {
    let Some(name) = value.as_str() else { return Err(wrong("evict", "the name of a policy", value)) };
    match name {
        "none" => Ok(None),
        name => name.parse().map(Some).map_err(|error| ApiError::param("kv.evict", error)),
    }
}

fn protect(value: &Value) -> Result<Protect, ApiError> {
    const ALLOWED: &str = "a list of \"system\", \"tools\", \"tool_results\" and {\"messages\": [indices]}";
    let items = value.as_array().ok_or_else(|| wrong("protect", ALLOWED, value))?;
    let mut protect = Protect { system: false, tools: false, results: false, messages: BTreeSet::new() };
    for item in items {
        let index = |index: &Value| index.as_u64().and_then(|index| usize::try_from(index).ok());
        match (item.as_str(), item["messages"].as_array()) {
            (Some("system"), _) => protect.system = true,
            (Some("tools"), _) => protect.tools = true,
            (Some("tool_results"), _) => protect.results = true,
            (None, Some(list)) => {
                let indices: Option<Vec<usize>> = list.iter().map(index).collect();
                protect.messages.extend(indices.ok_or_else(|| wrong("protect", ALLOWED, item))?);
            }
            _ => return Err(wrong("protect", ALLOWED, item)),
        }
    }
    Ok(protect)
}

impl Protect {
    fn covers(&self, index: usize, message: &Printed) -> bool {
        match message.role.as_deref() {
            // Descriptions of tools.
            None => self.tools,
            Some("system") if self.system => true,
            Some("tool") if self.results => true,
            _ => self.messages.contains(&index),
        }
    }

    /// Parts of the prompt, ascending. A protected message reaches from the end of the message before to
    /// the beginning of the one behind it, its role and separators included: so it is found even if the
    /// template changes its text.
    fn bytes(&self, prompt: &str, messages: &[Printed], found: &[Option<Range<usize>>]) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        // Templates print descriptions of tools before the first message, if they print them themselves.
        let first = found.iter().flatten().next().map_or(0, |first| first.start);
        if self.tools && first > 0 {
            parts.push(0..first);
        }
        // The client counts its own messages.
        let added = messages.iter().take_while(|message| message.role.is_none()).count();
        for (i, message) in messages.iter().enumerate() {
            if !self.covers(i.wrapping_sub(added), message) {
                continue;
            }
            let start = found[..i].iter().rev().flatten().next().map_or(0, |before| before.end);
            let end = found[i + 1..].iter().flatten().next().map_or(prompt.len(), |next| next.start);
            match parts.last_mut() {
                Some(last) if last.end >= start => last.end = end,
                _ => parts.push(start..end),
            }
        }
        parts
    }
}

/// The tokens that have bytes of a part.
fn tokens_of(offsets: &[Range<usize>], bytes: &Range<usize>) -> Range<usize> {
    let first = offsets.partition_point(|token| token.end <= bytes.start);
    let last = offsets.partition_point(|token| token.start < bytes.end);
    first..last.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const NOTHING: Protect =
        Protect { system: false, tools: false, results: false, messages: BTreeSet::new() };

    fn read(value: Value) -> Result<KvFields, String> {
        KvFields::read(value.as_object()).map_err(|error| error.to_string())
    }

    #[test]
    fn fields_are_understood_and_others_refused_by_name() {
        let kv = read(json!({"budget": 2048, "evict": "snapkv", "view": "auto"})).unwrap();
        assert_eq!((kv.budget, kv.evict, kv.whole), (Some(Budget::Rows(2048)), "snapkv".parse().ok(), false));
        assert_eq!(read(json!({"evict": "episodes"})).unwrap().evict, Some(Eviction::Episodes));
        assert_eq!(read(json!({"budget": "64M"})).unwrap().budget, Some(Budget::Bytes(64 << 20)));
        assert!(read(json!({"evict": "none"})).unwrap().whole);
        assert_eq!(read(json!({"budget": null})).unwrap(), KvFields::default());
        let kv = read(json!({"protect": ["tools", {"messages": [1, 4]}]})).unwrap();
        assert_eq!(kv.protect, Protect { tools: true, messages: [1, 4].into(), ..NOTHING });
        for (value, named) in [
            (json!({"budget": 0}), "kv.budget"),
            (json!({"budget": []}), "kv.budget"),
            (json!({"evict": "lru"}), "keydiff"),
            (json!({"view": "left"}), "kv.view"),
            (json!({"protect": "system"}), "kv.protect"),
            (json!({"protect": [{"messages": [-1]}]}), "kv.protect"),
            (json!({"rows": 5}), "rows"),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert!(error.contains(named), "{value}: {error}");
        }
    }

    #[test]
    fn protected_messages_are_found_in_the_prompt() {
        let printed = |role: Option<&str>, content: &str| Printed {
            role: role.map(str::to_owned),
            content: content.to_owned(),
        };
        let messages = [
            printed(Some("system"), "Rules."),
            printed(Some("user"), "Hi"),
            printed(Some("tool"), "not as printed"),
            printed(Some("user"), "Hi"),
        ];
        let prompt = "<s>Rules.<u>Hi<t>{}<u>Hi<a>";
        let parts = |protect: Protect| -> Vec<&str> {
            protect
                .bytes(prompt, &messages, &found(prompt, &messages))
                .into_iter()
                .map(|part| &prompt[part])
                .collect()
        };
        assert_eq!(parts(Protect::default()), ["<s>Rules.<u>"]);
        assert_eq!(parts(Protect { results: true, ..Protect::default() }), ["<s>Rules.<u>", "<t>{}<u>"]);
        // What the template prints before the first message may describe tools.
        assert_eq!(parts(Protect { tools: true, ..NOTHING }), ["<s>"]);
        let last = Protect { messages: [3].into(), ..NOTHING };
        assert_eq!(parts(last), ["<t>{}<u>Hi<a>"]);
        let both = Protect { system: true, messages: [1].into(), ..NOTHING };
        assert_eq!(parts(both), ["<s>Rules.<u>Hi<t>{}<u>"]);
        // The turn of the last user message, and the messages before it with their roles.
        let (text, before) = last_turn(&messages, &found(prompt, &messages)).unwrap();
        let before: Vec<&str> = before.into_iter().map(|part| &prompt[part]).collect();
        assert_eq!((text, before), ("Hi", vec!["<s>Rules.", "<u>Hi"]));
        assert!(last_turn(&messages[..1], &found(prompt, &messages[..1])).is_none(), "no user has spoken");
        assert_eq!(tokens_of(&[0..3, 3..9, 9..12, 12..14], &(4..12)), 1..3);
        assert_eq!(tokens_of(&[0..3, 3..9], &(9..9)), 2..2);
    }
}
