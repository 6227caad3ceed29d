//! The environment variable `OSCAR_CPU`, seen from outside: the choice is made once per process, so each case
//! gets a process of its own.

use std::process::Command;

use oscar_kernels_cpu::{Kernels, Variant};

#[test]
#[ignore = "the other tests here run it, with an environment of their choice"]
fn print_choice() {
    match Kernels::chosen() {
        Ok(kernels) => println!("chosen <{}>", kernels.variant()),
        Err(error) => println!("refused <{error}>"),
    }
}

fn choice_with(wish: Option<&str>) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "print_choice", "--nocapture"]).env_remove("OSCAR_CPU");
    if let Some(wish) = wish {
        command.env("OSCAR_CPU", wish);
    }
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

#[test]
fn without_a_wish_the_best_variant_is_chosen() {
    let output = choice_with(None);
    assert!(output.contains(&format!("chosen <{}>", Variant::best())), "{output}");
}

#[test]
fn a_wish_is_granted_or_refused_never_replaced() {
    for variant in Variant::ALL {
        let output = choice_with(Some(variant.name()));
        let expected = if variant.is_available() { "chosen <" } else { "refused <CPU variant '" };
        assert!(output.contains(&format!("{expected}{variant}")), "{output}");
    }
}

#[test]
fn an_unknown_wish_is_refused_with_the_alternatives() {
    let output = choice_with(Some("sse9"));
    assert!(output.contains("refused <unknown CPU variant 'sse9'"), "{output}");
    assert!(output.contains("available here: scalar"), "{output}");
}
