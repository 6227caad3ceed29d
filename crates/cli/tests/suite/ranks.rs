//! `--tensor-parallel`: the embedded model over two ranks, from the command line and over HTTP.

use crate::server::Server;
use crate::support::{fail, json_lines};
use serde_json::{Value, json};

const SERVE: [&str; 6] = ["--port", "0", "--device", "cpu", "--threads", "2"];

fn serve(flags: &[&str]) -> Server {
    Server::start_with(None, &[&SERVE[..], &["--context", "2048"], flags].concat())
}

/// An answer over enough text that most of it is read quantized.
fn ask(server: &Server) -> Value {
    let lines: Vec<String> = (0..60).map(|i| format!("Line {i}: the number is {}.", i * 37 % 89)).collect();
    let question = format!("{}\nWhat is the number in line 7?", lines.join("\n"));
    let answer = server.chat(&json!({"max_tokens": 24, "messages": [{"role": "user", "content": question}]}));
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

#[test]
fn a_server_of_two_ranks_answers_as_one_of_one_rank() {
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let one = text(&ask(&serve(&[])));
    let two = serve(&["--tensor-parallel", "2"]);
    assert!(two.seen.contains("2 ranks, each: cpu") && two.seen.contains("1 threads"), "{}", two.seen);
    assert!(two.seen.contains("cache: oscar (2.23 bits)"), "{}", two.seen);
    let first = ask(&two);
    assert_eq!(text(&first), one);
    assert!(first["usage"]["prompt_tokens"].as_u64().unwrap() > 600, "{first}");
    // From the prefix cache, whose page tables serve both ranks.
    let again = ask(&two);
    assert_eq!(text(&again), one);
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 500, "{again}");
    let stream = two.chat(&json!({"stream": true, "max_tokens": 8, "logprobs": true}));
    assert!(stream.status == 200 && stream.body.ends_with("data: [DONE]\n\n"), "{}", stream.body);
    let embedded = json!({"model": "oscar-15m", "input": "the same on every rank"});
    let embedding = two.send("POST", "/v1/embeddings", None, Some(&embedded));
    assert_eq!(embedding.status, 200, "{}", embedding.body);
}

#[test]
fn run_and_bench_take_ranks() {
    let prompt = ["run", "--device", "cpu", "--threads", "2", "--prompt", "Who are you?", "--json"];
    let greedy = ["--temperature", "0", "--max-tokens", "12", "--context", "512", "--kv", "bf16"];
    let one = json_lines(&[&prompt[..], &greedy].concat());
    let two = json_lines(&[&prompt[..], &greedy, &["--tensor-parallel", "2"]].concat());
    assert_eq!(one[0]["text"], two[0]["text"]);
    assert_eq!(one[0]["cache_bytes"], two[0]["cache_bytes"], "the heads of both ranks are counted");
    let bench = ["bench", "decode", "--device", "cpu", "--threads", "2", "--context", "256", "--kv", "oscar"];
    let rows =
        json_lines(&[&bench[..], &["--repetitions", "2", "--json", "--tensor-parallel", "2"]].concat());
    assert_eq!((&rows[0]["ranks"], &rows[0]["threads"]), (&json!(2), &json!(2)), "{rows:?}");
}

#[test]
fn what_ranks_cannot_do_is_refused_by_name() {
    let refused = |flags: &[&str]| fail(&[&["serve"], &SERVE[..], flags].concat()).1;
    let message = refused(&["--tensor-parallel", "3"]);
    assert!(message.contains("2 KV heads do not divide by 3; 1, 2 works"), "{message}");
    for flags in [["--store", "pages"], ["--store-ram", "1G"], ["--kv-budget", "2048"]] {
        let message = refused(&[&["--tensor-parallel", "2"][..], &flags].concat());
        assert!(message.contains(flags[0]) && message.contains("--tensor-parallel"), "{message}");
    }
    let message = fail(&["run", "--device", "cuda", "--prompt", "x", "--tensor-parallel", "2"]).1;
    assert!(message.contains("works on the CPU only") && message.contains("NCCL"), "{message}");
    let message = fail(&["bench", "prefill", "--tensor-parallel", "2"]).1;
    assert!(message.contains("bench decode"), "{message}");
    assert!(fail(&["run", "--prompt", "x", "--tensor-parallel", "0"]).1.contains("at least 1"));
}
