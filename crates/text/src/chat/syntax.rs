//! The `generation` tag of `transformers`, which marks what an assistant wrote and prints nothing
//! itself.
//!
//! Invariant: the rewritten template has the same lines and the same whitespace control, and
//! renders the same text. The tag opens a scope in Python, so it becomes the tag that does the same
//! here: `with`.

const OPEN: &str = "{%";
const CLOSE: &str = "%}";

/// Replaces `{% generation %}` and `{% endgeneration %}` by `{% with %}` and `{% endwith %}`.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find(OPEN) {
        let (before, tag) = rest.split_at(at + OPEN.len());
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find(CLOSE) else { break };
        let inner = &tag[..end];
        let name = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&inner.replacen(name, replacement, 1));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::without_generation_tags as strip;

    #[test]
    fn tags_keep_their_whitespace_control() {
        assert_eq!(
            strip("a {%- generation -%}\n x {% endgeneration +%} b"),
            "a {%- with -%}\n x {% endwith +%} b"
        );
    }

    #[test]
    fn other_text_is_untouched() {
        for source in
            ["", "{% if generation %}x{% endif %}", "generation {% ", "{{ '{% generations %}' }}", "{%%}"]
        {
            assert_eq!(strip(source), source);
        }
    }
}
