//! Puts the charges of [`limits`](super::limits) between the steps of a compiled template.
//!
//! A step that builds a value is followed by a filter that weighs it; an operator that grows its operands is preceded by
//! one that charges for the growth; raw text goes through the formatter like everything else that is printed. The
//! filters have names that no template can write.
//!
//! This uses `minijinja`'s unstable access to compiled templates; its version is pinned for that reason.

use std::collections::BTreeMap;

use minijinja::machinery::{
    Instruction, Instructions, Token, WhitespaceConfig, get_compiled_template, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Template, Value};

pub(super) const CONCAT: &str = "<concat>";
pub(super) const ADD: &str = "<add>";
pub(super) const MULTIPLY: &str = "<multiply>";
pub(super) const BUILT: &str = "<built>";
pub(super) const RESULT: &str = "<result>";

/// Does not cache the filter.
const UNCACHED: u8 = !0;

/// The blocks of a template, by name.
type Blocks<'a> = BTreeMap<&'a str, Instructions<'a>>;

/// The steps of a template, with charges.
pub(super) fn instrument<'a>(template: &Template<'a, 'a>) -> (Instructions<'a>, Blocks<'a>) {
    let compiled = get_compiled_template(template);
    let blocks = compiled.blocks.iter().map(|(name, block)| (*name, charged(block))).collect();
    (charged(&compiled.instructions), blocks)
}

/// The line where a template wants another one, which would run without charges.
pub(super) fn other_template(template: &Template<'_, '_>) -> Option<usize> {
    let compiled = get_compiled_template(template);
    let mut all = compiled.blocks.values().chain([&compiled.instructions]);
    all.find_map(|steps| {
        let wants = |index: &u32| {
            matches!(steps.get(*index), Some(Instruction::Include(_) | Instruction::LoadBlocks))
        };
        (0..steps.len() as u32).find(wants).map(|index| steps.get_line(index).unwrap_or(1))
    })
}

fn charged<'a>(old: &Instructions<'a>) -> Instructions<'a> {
    let all: Vec<Vec<Instruction<'a>>> =
        (0..old.len() as u32).map(|index| old.get(index).map(expanded).unwrap_or_default()).collect();
    // Where each old step, and the end, comes to lie.
    let mut places = Vec::with_capacity(all.len() + 1);
    let mut next = 0;
    for steps in &all {
        places.push(next);
        next += steps.len() as u32;
    }
    places.push(next);
    let mut new = Instructions::new(old.name(), old.source());
    for (index, steps) in all.into_iter().enumerate() {
        let line = old.get_line(index as u32).unwrap_or(0) as u16;
        for mut step in steps {
            if let Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::Iterate(target)
            | Instruction::BuildMacro(_, target, _) = &mut step
            {
                *target = places[*target as usize];
            }
            new.add_with_line(step, line);
        }
    }
    new
}

fn expanded<'a>(step: &Instruction<'a>) -> Vec<Instruction<'a>> {
    let filter = |name: &'static str, args: u16| Instruction::ApplyFilter(name, Some(args), UNCACHED);
    let grows = |name: &'static str| vec![filter(name, 2), Instruction::UnpackList(2), step.clone()];
    match step {
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        Instruction::StringConcat => grows(CONCAT),
        Instruction::Add => grows(ADD),
        Instruction::Mul => grows(MULTIPLY),
        Instruction::LoadConst(value) if value.as_object().is_some() => vec![step.clone(), filter(BUILT, 1)],
        Instruction::BuildList(_) | Instruction::BuildMap(_) => vec![step.clone(), filter(BUILT, 1)],
        Instruction::ApplyFilter(..)
        | Instruction::CallFunction(..)
        | Instruction::CallMethod(..)
        | Instruction::CallObject(..) => vec![step.clone(), filter(RESULT, 1)],
        _ => vec![step.clone()],
    }
}

/// Products in a template.
pub(super) fn products(source: &str) -> usize {
    let tokens = tokenize(source, false, SyntaxConfig, WhitespaceConfig::default());
    tokens.map_while(Result::ok).filter(|(token, _)| matches!(token, Token::Mul)).count()
}
