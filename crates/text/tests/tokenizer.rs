//! The tokenizer and its stream against a real vocabulary (byte-level BPE) and a small
//! byte-fallback one.

use std::path::{Path, PathBuf};

use oscar_text::{ChatInput, ModelText, StreamDecoder, TextError, Tokenizer, TokenizerConfig};
use proptest::prelude::*;
use serde_json::{Value, json};

fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m")
}

fn model() -> ModelText {
    let read = |name| std::fs::read(model_dir().join(name)).unwrap();
    ModelText::from_files(&read("tokenizer.json"), Some(&read("tokenizer_config.json")), None).unwrap()
}

/// A vocabulary in the manner of Llama 2: words with `▁`, every byte as `<0xNN>`, and a leading
/// space that the decoder strips.
fn byte_fallback() -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    for special in ["<unk>", "<s>", "</s>"] {
        vocab.insert(special.to_owned(), json!(vocab.len()));
    }
    for byte in 0..=255u8 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    for piece in ["▁", "▁a", "▁▁b", "c", "é", "\u{FFFD}", "▁你", "🙂"] {
        vocab.insert(piece.to_owned(), json!(vocab.len()));
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                  "ignore_merges": false, "vocab": vocab, "merges": []}
    });
    Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default()).unwrap()
}

/// Streams the ids and checks what must hold of every stream; returns the pieces, the last one
/// flushed.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut decoder = StreamDecoder::new(tokenizer, skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    pieces.push(decoder.flush().unwrap());
    assert_eq!(pieces.concat(), tokenizer.decode(ids, skip_special).unwrap(), "ids {ids:?}");
    assert_eq!(decoder.flush().unwrap(), "", "a flushed decoder holds nothing");
    pieces
}

#[test]
fn ids_equal_those_of_transformers() {
    let tokenizer = model().tokenizer;
    let cases: Vec<Value> = serde_json::from_str(include_str!("fixtures/prompt_ids.json")).unwrap();
    assert_eq!(cases.len(), 2);
    for case in cases {
        let prompt = case["prompt"].as_str().unwrap();
        let expected: Vec<u32> =
            case["input_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(tokenizer.encode(prompt, true).unwrap(), expected, "{}", case["name"]);
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), prompt);
        stream(&tokenizer, &expected, false);
    }
}

#[test]
fn the_models_template_gives_the_prompt_it_was_trained_on() {
    let model = model();
    let messages = json!([{"role": "user", "content": "Who are you?"}]);
    let prompt = model.chat.unwrap().render(&ChatInput::new(&messages)).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn special_tokens_have_ids_and_can_be_skipped() {
    let tokenizer = model().tokenizer;
    let special = tokenizer.special();
    let ids = [special.bos(), special.eos(), special.pad()].map(|token| tokenizer.token_to_id(token?));
    assert_eq!(ids, [None, Some(2), Some(0)]);
    assert_eq!(tokenizer.vocab_size(), 6144);
    assert_eq!(tokenizer.token_to_id("<|im_start|>"), Some(1));
    assert_eq!(tokenizer.id_to_token(1).as_deref(), Some("<|im_start|>"));
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(417));
    let ids = tokenizer.encode("<|im_start|>hi<|im_end|>", false).unwrap();
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "hi");
    assert_eq!(stream(&tokenizer, &ids, true).concat(), "hi");
    assert_eq!(stream(&tokenizer, &ids, false).concat(), "<|im_start|>hi<|im_end|>");
}

#[test]
fn a_character_appears_only_when_its_last_byte_has_come() {
    let tokenizer = model().tokenizer;
    let ids = tokenizer.encode("a你🙂", false).unwrap();
    let pieces = stream(&tokenizer, &ids, true);
    assert!(pieces.iter().any(String::is_empty), "the vocabulary spells these in bytes: {pieces:?}");
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')));
    // Cut inside the last character: the rest becomes a mark, and only at the end.
    let cut = stream(&tokenizer, &ids[..ids.len() - 1], true);
    assert_eq!(cut.last().unwrap(), "\u{FFFD}");
}

#[test]
fn byte_fallback_runs_are_held_until_they_end() {
    let tokenizer = byte_fallback();
    let byte = |byte: u8| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap();
    let token = |token: &str| tokenizer.token_to_id(token).unwrap();
    let ids = [token("▁a"), byte(0xE4), byte(0xBD), byte(0xA0), token("c"), token("▁a")];
    assert_eq!(stream(&tokenizer, &ids, true), ["a", "", "", "", "你c", " a", ""]);
    // One bad byte spoils its run, in the stream as in the whole.
    let ids = [byte(0xE4), byte(0xBD), byte(0xA0), byte(0xFF), token("c")];
    assert_eq!(stream(&tokenizer, &ids, true).concat(), "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}c");
    // A special token in the middle must not lose the space after it.
    let ids = [token("▁a"), token("<s>"), token("▁a"), token("▁"), token("▁▁b"), token("</s>")];
    assert_eq!(stream(&tokenizer, &ids, true).concat(), "a a   b");
    assert_eq!(stream(&tokenizer, &ids, false).concat(), "a<s> a   b</s>");
}

#[test]
fn a_literal_replacement_character_is_text() {
    let tokenizer = byte_fallback();
    let mark = tokenizer.token_to_id("\u{FFFD}").unwrap();
    assert_eq!(stream(&tokenizer, &[mark, mark], true)[..2], ["\u{FFFD}", "\u{FFFD}"]);
}

/// Vocabularies whose decoders join or strip text between tokens.
#[test]
fn other_decoders_stream_exactly() {
    let decoders = [
        json!(null),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        json!({"type": "BPEDecoder", "suffix": "</w>"}),
        json!({"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": true,
               "trim_offsets": true, "use_regex": true}, {"type": "Fuse"}]}),
    ];
    for decoder in decoders {
        let vocab = json!({"[UNK]": 0, "▁a": 1, "b": 2, "##c": 3, "d</w>": 4, ".": 5, "▁": 6, "Ġ": 7, "ä": 8, "½": 9, "ł": 10});
        let file = json!({"version": "1.0", "added_tokens": [], "decoder": decoder, "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "truncation": null, "padding": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}});
        let tokenizer =
            Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default()).unwrap();
        for ids in [
            &[1, 2, 3, 4, 5, 4, 1, 6, 2][..],
            &[4, 4, 4, 5, 3, 3, 1],
            &[6, 6, 1, 2, 7, 2, 2, 2, 2, 2, 3],
            &[8, 9, 10, 2, 8, 9, 10, 1, 8, 9],
            &[],
        ] {
            stream(&tokenizer, ids, true);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn text_survives_the_round_trip(text in "\\PC{0,40}|[a-z \\n🙂你é]{0,60}") {
        let tokenizer = shared_model();
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(stream(tokenizer, &ids, false).concat(), text);
    }

    #[test]
    fn any_byte_level_ids_stream_exactly(ids in prop::collection::vec(0u32..6144, 0..40), low in prop::collection::vec(3u32..259, 0..40), skip: bool) {
        stream(shared_model(), &ids, skip);
        // The low ids are the single bytes: mostly invalid UTF-8.
        let pieces = stream(shared_model(), &low, skip);
        prop_assert_eq!(pieces.len(), low.len() + 1);
    }

    #[test]
    fn any_byte_fallback_ids_stream_exactly(
        ids in prop::collection::vec(prop_oneof![0u32..267, 259u32..267, Just(3 + 0xE4), Just(3 + 0xBD), Just(3 + 0xA0)], 0..30),
        skip: bool,
    ) {
        stream(shared_fallback(), &ids, skip);
    }
}

fn shared_model() -> &'static Tokenizer {
    static SHARED: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    SHARED.get_or_init(|| model().tokenizer)
}

fn shared_fallback() -> &'static Tokenizer {
    static SHARED: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    SHARED.get_or_init(byte_fallback)
}

#[test]
fn unknown_ids_are_refused() {
    let tokenizer = model().tokenizer;
    for id in [6144, u32::MAX] {
        let error = tokenizer.decode(&[1, id], true).unwrap_err();
        assert!(matches!(error, TextError::UnknownToken { id: named, vocab_size: 6144 } if named == id));
        let mut decoder = StreamDecoder::new(&tokenizer, true);
        assert!(matches!(decoder.push(id), Err(TextError::UnknownToken { .. })));
    }
}

#[test]
fn damaged_files_are_refused() {
    let whole = std::fs::read(model_dir().join("tokenizer.json")).unwrap();
    let config = TokenizerConfig::default();
    for bytes in
        [&b""[..], b"{}", b"null", b"\xFF\xFE\x00", b"{\"version\": \"1.0\"}", &whole[..whole.len() / 2]]
    {
        let error = Tokenizer::from_json(bytes, &config).unwrap_err();
        assert!(matches!(error, TextError::TokenizerJson { .. }), "{error}");
        assert!(error.to_string().starts_with("tokenizer.json is not a usable tokenizer"));
    }
}

/// A token must cost the same at the end of a long reply as at its beginning; a decoder that looked
/// back over the whole sequence would need hours here.
#[test]
fn a_long_stream_stays_cheap() {
    for tokenizer in [shared_model(), shared_fallback()] {
        let mut decoder = StreamDecoder::new(tokenizer, true);
        let mut length = 0;
        for step in 0..300_000u32 {
            length += decoder.push(200 + step % 67).unwrap().len();
        }
        assert!(length + decoder.flush().unwrap().len() > 0);
    }
}

#[test]
fn special_tokens_of_tool_calls_can_be_kept() {
    let text = |tokenizer: &Tokenizer, ids: &[u32], keep: &[&str]| -> String {
        let mut decoder = StreamDecoder::new(tokenizer, true).keeping(keep);
        let pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
        pieces.concat() + &decoder.flush().unwrap()
    };
    let bytes = model().tokenizer;
    let ids = bytes.encode("a<|im_start|>é<|im_end|>b", false).unwrap();
    assert_eq!(text(&bytes, &ids, &["<|im_start|>", "no token"]), "a<|im_start|>éb");
    let pieces = byte_fallback();
    let ids = ["▁a", "<s>", "▁a", "</s>", "c"].map(|token| pieces.token_to_id(token).unwrap());
    assert_eq!(text(&pieces, &ids, &["<s>"]), "a<s>ac");
}

/// Each of these made the library panic, at loading or at the first text.
#[test]
fn files_that_make_the_library_panic_are_refused_or_harmless() {
    let file = include_str!("../../fuzz/corpus/tokenizer.json");
    let sound: Value = serde_json::from_str(file).unwrap();
    let changes = [
        ("normalizer", json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"})),
        ("decoder", json!({"type": "Strip", "content": "a", "start": u32::MAX, "stop": u32::MAX})),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
    ];
    for (field, value) in changes {
        let mut changed = sound.clone();
        changed[field] = value.clone();
        let built = Tokenizer::from_json(changed.to_string().as_bytes(), &TokenizerConfig::default());
        if let Ok(tokenizer) = built {
            let ids = tokenizer.encode("Some text", true).unwrap_or_default();
            let _ = tokenizer.decode(&ids, false);
        }
    }
    let mut changed = sound;
    changed["model"]["continuing_subword_prefix"] = json!("##########");
    let error =
        Tokenizer::from_json(changed.to_string().as_bytes(), &TokenizerConfig::default()).unwrap_err();
    assert!(matches!(error, TextError::TokenizerJson { .. }), "{error}");
}

#[test]
fn texts_of_far_too_many_tokens_are_given_up() {
    let tokenizer = model().tokenizer;
    let text = "7".repeat(300_000);
    assert!(matches!(tokenizer.encode_at_most(&text, false, 1000), Err(TextError::TooManyTokens { .. })));
    assert_eq!(tokenizer.encode_at_most(&text, false, 300_000).unwrap().len(), 300_000);
    assert!(tokenizer.most_bytes_per_token() >= 13, "{}", tokenizer.most_bytes_per_token());
}
