//! Templates that are wrong, refuse, or never end, and the choice between several templates.

use oscar_text::{ChatInput, ChatTemplate, NamedTemplate, SpecialTokens, TextError};
use serde_json::{Value, json};

fn compile(source: &str) -> Result<ChatTemplate, TextError> {
    ChatTemplate::from_source(source, &SpecialTokens::default())
}

fn render(source: &str) -> Result<String, TextError> {
    compile(source)?.render(&ChatInput::new(&json!([{"role": "user", "content": "hi"}])))
}

#[test]
fn syntax_errors_name_their_line() {
    for (source, expected) in
        [("a\nb\n{% if %}", 3), ("{{ x", 1), ("\n{% endfor %}", 2), ("{% for a in b %}", 1)]
    {
        match compile(source) {
            Err(TextError::TemplateSyntax { line, reason, .. }) => {
                assert_eq!(line, expected, "{source}: {reason}")
            }
            other => panic!("{source}: {other:?}"),
        }
    }
}

#[test]
fn a_refusal_keeps_its_words() {
    let direct = "{{ raise_exception('No <role> \"é\"!') }}";
    let nested = "{% macro check() %}{{ raise_exception('No <role> \"é\"!') }}{% endmacro %}\n{% for m in messages %}{{ check() | trim }}{% endfor %}";
    for source in [direct, nested] {
        match render(source) {
            Err(TextError::TemplateRaised { message }) => assert_eq!(message, "No <role> \"é\"!"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn endless_templates_are_stopped() {
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(loops), Err(TextError::TemplateTooLong { line: 1, .. })));
    let small = compile("\n{% for m in messages %}{{ m.role }}{% endfor %}").unwrap().with_step_limit(5);
    let error = small.render(&ChatInput::new(&json!([{}, {}, {}]))).unwrap_err();
    assert!(matches!(error, TextError::TemplateTooLong { line: 2, steps: 5, .. }), "{error}");

    let recursion = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    let error = render(recursion).unwrap_err();
    assert!(matches!(error, TextError::TemplateRender { .. }), "{error}");
    let nested = "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}";
    assert!(render(nested).unwrap_err().to_string().contains("nested too deeply"));
}

/// Each fails in Jinja2 as well.
#[test]
fn undefined_values_fail_where_jinja_fails() {
    for source in [
        "\n{{ missing.attribute }}",
        "\n{{ missing['key'] }}",
        "\n{{ 'text' + missing }}",
        "\n{{ missing + 'text' }}",
        "\n{{ messages[0].nothing.more }}",
        "\n{{ missing() }}",
        "\n{{ missing | tojson }}",
        "\n{{ missing.strip() }}",
        "\n{{ 'text' + none }}",
        "\n{{ messages.append(1) }}",
        "\n{{ messages[0].update({}) }}",
        "\n{{ 'x' | no_such_filter }}",
        "\n{{ 'x' | tojson(no_such_argument=1) }}",
        "\n{{ strftime_now('%Q') }}",
    ] {
        match render(source) {
            Err(TextError::TemplateRender { line: 2, template, .. }) => assert_eq!(template, "default"),
            other => panic!("{source}: {other:?}"),
        }
    }
}

#[test]
fn tools_choose_their_template() {
    let named = |name: &str, source: &str| NamedTemplate { name: name.into(), source: source.into() };
    let chat = ChatTemplate::new(
        &[named("default", "plain"), named("tool_use", "tools"), named("rag", "{{ documents[0].title }}")],
        &SpecialTokens::default(),
    )
    .unwrap();
    let (messages, tools, documents) = (json!([]), json!([]), json!([{"title": "é"}]));
    let plain = ChatInput::new(&messages);
    assert_eq!(chat.render(&plain).unwrap(), "plain");
    assert_eq!(chat.render(&ChatInput { tools: Some(&tools), ..plain }).unwrap(), "tools");
    let rag = ChatInput { template: Some("rag"), documents: Some(&documents), ..plain };
    assert_eq!(chat.render(&rag).unwrap(), "é");
    let error = chat.render(&ChatInput { template: Some("none"), ..plain }).unwrap_err();
    assert!(error.to_string().ends_with("default, tool_use, rag"), "{error}");
    assert!(matches!(ChatTemplate::new(&[], &SpecialTokens::default()), Err(TextError::NoChatTemplate)));
}

#[test]
fn extra_variables_may_replace_tokens_but_not_messages() {
    let mut special = SpecialTokens::default();
    special.set("bos_token", "<s>");
    let chat =
        ChatTemplate::from_source("{{ bos_token }}{{ tools is none }}{{ eos_token is defined }}", &special)
            .unwrap();
    let messages = json!([]);
    assert_eq!(chat.render(&ChatInput::new(&messages)).unwrap(), "<s>TrueFalse");
    let extra = json!({"bos_token": "<bos>"});
    let input = ChatInput { extra: extra.as_object(), ..ChatInput::new(&messages) };
    assert_eq!(chat.render(&input).unwrap(), "<bos>TrueFalse");
    let extra = json!({"messages": []});
    let input = ChatInput { extra: extra.as_object(), ..ChatInput::new(&messages) };
    assert!(matches!(chat.render(&input), Err(TextError::ReservedVariable { name }) if name == "messages"));
}

#[test]
fn messages_must_be_a_list() {
    let chat = compile("x").unwrap();
    for messages in [Value::Null, json!({}), json!("text"), json!(3)] {
        let error = chat.render(&ChatInput::new(&messages)).unwrap_err();
        assert!(error.to_string().starts_with("`messages` must be a list, not "), "{error}");
    }
}

#[test]
fn the_engine_clock_reads_utc() {
    let year: u32 = render("{{ strftime_now('%Y') }}").unwrap().parse().unwrap();
    assert!(year >= 2025);
}

/// Templates that would use any amount of memory, time or stack.
#[test]
fn templates_that_grow_are_stopped() {
    let grow = |first: &str, step: &str| {
        format!(
            "{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
        )
    };
    let bombs = [
        grow("'ab'", "ns.x ~ ns.x"),
        grow("'ab'", "ns.x + ns.x"),
        grow("'ab'", "ns.x * 9"),
        grow("[1, 2]", "ns.x + ns.x"),
        grow("[1, 2]", "ns.x * 9"),
        grow("[1, 2]", "[ns.x, ns.x]"),
        grow("{'a': 1}", "{'a': ns.x, 'b': ns.x}"),
        grow("'a'", "ns.x | replace('a', 'aaaaaaaa')"),
        grow("'a'", "ns.x.replace('a', 'aaaaaaaa')"),
        grow("'a'", "[ns.x, ns.x] | join(ns.x)"),
        grow("'a'", "ns.x.join([ns.x, ns.x])"),
        grow("'a'", "'%s%s' | format(ns.x, ns.x)"),
        "{{ 'a' | indent(10**10) }}".into(),
        "{{ 'a' | indent(width=10**10) }}".into(),
        "{{ '%99999999999d' | format(1) }}".into(),
        "{{ '{:>99999999999}'.format('a') }}".into(),
        "{{ [1] | batch(10**10, 'x') | list }}".into(),
        "{{ [0] * 10**9 | length }}".into(),
        "{{ ([0] * 10**9) | length }}".into(),
        "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{{ x }}{% endfor %}".into(),
        format!("{{% for i in range(99999) %}}{}{{% endfor %}}", "raw text ".repeat(9999)),
        "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{{ x }}{% endmacro %}{{ f('ab', 60) }}".into(),
        "{% set x = 'ab' %}".to_owned() + &"{% set x %}{{ x }}{{ x }}{% endset %}".repeat(60),
        "{{ 'a' ".to_owned() + &"* 999 ".repeat(20) + "}}",
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l == [ns.l] }}".into(),
        "{% include 'default' %}".into(),
    ];
    for source in bombs {
        let shown: String = source.chars().take(150).collect();
        match render(&source) {
            Err(TextError::TemplateRender { .. } | TextError::TemplateSyntax { .. }) => {}
            other => panic!("{shown}: {:?}", other.map(|text| text.len())),
        }
    }
}

#[test]
fn ordinary_growth_is_fine() {
    let source = "{% set ns = namespace(x='', l=[]) %}{% for i in range(2000) %}{% set ns.x = ns.x ~ 'some text ' %}\
        {% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.x | length }} {{ ns.l | length }} {{ 'ab' * 3 }} {{ [1] * 2 }}";
    assert_eq!(render(source).unwrap(), "20000 2000 ababab [1, 1]");
}
