//! How much memory a template may use.
//!
//! The engine counts steps, but one step can double a text or a list. So a rendering has a budget: every text and
//! collection that an operator, a filter, a method or an output builds is charged against it, the ones that grow by a
//! factor before they are built. [`instrument`](super::instrument) puts the charges between the steps.
//!
//! Invariant: a value never nests deeper than [`MOST_LEVELS`], so comparing, printing and dropping it stays within a
//! small stack.

use std::cell::Cell;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::instrument::{ADD, BUILT, CONCAT, MULTIPLY, RESULT};

/// Bytes that one rendering may build in all.
pub(super) const BUDGET: usize = 512 << 20;

/// Nesting of a value.
const MOST_LEVELS: usize = 300;

/// What an item of a collection counts.
const ITEM: usize = 16;

/// Largest count that a filter may be given: a width, or items of a row.
const MOST_COUNT: usize = 100_000;

thread_local! {
    /// Bytes left to the rendering on this thread.
    static LEFT: Cell<usize> = const { Cell::new(BUDGET) };
}

/// Marks an error as one of the budget.
#[derive(Debug, thiserror::Error)]
#[error("the template builds more than {BUDGET} bytes")]
pub(super) struct OverBudget;

/// Begins a rendering on this thread.
pub(super) fn begin() {
    LEFT.set(BUDGET);
}

/// Takes bytes from the budget of this rendering.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    match LEFT.get().checked_sub(bytes) {
        Some(left) => {
            LEFT.set(left);
            Ok(())
        }
        None => Err(over_budget()),
    }
}

fn over_budget() -> Error {
    Error::new(ErrorKind::InvalidOperation, OverBudget.to_string()).with_source(OverBudget)
}

/// Charges everything that printing the value would visit.
fn weigh(value: &Value, level: usize) -> Result<(), Error> {
    if level > MOST_LEVELS {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply"));
    }
    match value.kind() {
        ValueKind::String | ValueKind::Bytes => charge(ITEM + value.len().unwrap_or(0)),
        ValueKind::Seq | ValueKind::Iterable => {
            charge(ITEM)?;
            value.try_iter()?.try_for_each(|item| weigh(&item, level + 1))
        }
        ValueKind::Map => {
            charge(ITEM)?;
            value.try_iter()?.try_for_each(|key| {
                weigh(&key, level + 1)?;
                weigh(&value.get_item(&key).unwrap_or_default(), level + 1)
            })
        }
        _ => charge(ITEM),
    }
}

/// Bytes or items times their size; `None` for what is neither text nor collection.
fn size(value: &Value) -> Option<usize> {
    match value.kind() {
        ValueKind::String => value.as_str().map(str::len),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.len().or_else(|| value.try_iter().ok().map(Iterator::count));
            items.map(|items| items.saturating_mul(ITEM))
        }
        _ => None,
    }
}

fn check_count(count: usize) -> Result<usize, Error> {
    match count <= MOST_COUNT {
        true => Ok(count),
        false => Err(Error::new(ErrorKind::InvalidOperation, format!("{count} is more than {MOST_COUNT}"))),
    }
}

/// Formats such as `%99999999d` are as long as they say.
pub(super) fn check_format(format: &str) -> Result<(), Error> {
    let digits = format.split(|c: char| !c.is_ascii_digit());
    digits
        .filter(|digits| !digits.is_empty())
        .try_for_each(|digits| check_count(digits.parse().unwrap_or(usize::MAX)).and_then(charge))
}

/// Charges for `text.replace(from, to)`.
pub(super) fn charge_replace(text: &str, from: &str, to: &str) -> Result<(), Error> {
    charge(text.len())?;
    charge(text.matches(from).count().saturating_mul(to.len()))
}

/// Charges for joining items with a separator.
pub(super) fn charge_join(items: &Value, separator: usize) -> Result<(), Error> {
    weigh(items, 0)?;
    let count = items.len().or_else(|| items.try_iter().ok().map(Iterator::count)).unwrap_or(0);
    charge(count.saturating_mul(separator))
}

/// Adds the charges of operators and results, and puts filters that can grow a value under them.
pub(super) fn install(environment: &mut Environment<'_>) {
    // Both operands go back on the stack, the first one on top.
    let back = |left: Value, right: Value| Value::from(vec![right, left]);
    environment.add_filter(CONCAT, move |left: Value, right: Value| -> Result<Value, Error> {
        weigh(&left, 0)?;
        weigh(&right, 0)?;
        Ok(back(left, right))
    });
    environment.add_filter(ADD, move |left: Value, right: Value| -> Result<Value, Error> {
        if let (Some(a), Some(b)) = (size(&left), size(&right)) {
            charge(a.saturating_add(b))?;
        }
        Ok(back(left, right))
    });
    environment.add_filter(MULTIPLY, move |left: Value, right: Value| -> Result<Value, Error> {
        for (one, times) in [(&left, &right), (&right, &left)] {
            if let (Some(bytes), Some(times)) = (size(one), times.as_usize()) {
                charge(bytes.saturating_mul(times))?;
            }
        }
        Ok(back(left, right))
    });
    for name in [BUILT, RESULT] {
        environment.add_filter(name, |value: Value| weigh(&value, 0).map(|()| value));
    }

    environment.add_filter("<indent>", minijinja::filters::indent);
    environment.add_filter("<batch>", minijinja::filters::batch);
    environment.add_filter("<slice>", minijinja::filters::slice);
    environment.add_filter("<format>", minijinja::filters::format);
    environment.add_filter("<replace>", minijinja::filters::replace);
    let mut charged = |name: &'static str, cost: fn(&Value, &[Value]) -> Result<(), Error>| {
        environment.add_filter(name, move |state: &State, value: Value, args: Rest<Value>| {
            cost(&value, &args)?;
            let all: Vec<Value> = std::iter::once(value).chain(args.iter().cloned()).collect();
            state.apply_filter(&format!("<{name}>"), &all)
        });
    };
    charged("indent", |value, args| {
        let lines = value.as_str().map_or(0, |text| text.lines().count() + 1);
        charge(largest_count(args)?.saturating_mul(lines))
    });
    for name in ["batch", "slice"] {
        charged(name, |_, args| charge(largest_count(args)?.saturating_mul(ITEM)));
    }
    charged("format", |value, args| {
        check_format(value.as_str().unwrap_or_default())?;
        largest_count(args).map(|_| ())
    });
    charged("replace", |value, args| match (value.as_str(), args) {
        (Some(text), [from, to, ..]) => {
            charge_replace(text, from.as_str().unwrap_or_default(), &to.to_string())
        }
        _ => Ok(()),
    });
}

/// The largest number among the arguments, if it is one that a filter may be given.
fn largest_count(args: &[Value]) -> Result<usize, Error> {
    let mut largest = 0;
    for value in args {
        if value.is_kwargs() {
            let named = Kwargs::try_from(value.clone())?;
            for name in named.args() {
                let number: Value = named.peek(name)?;
                largest = largest.max(number.as_usize().unwrap_or(0));
            }
        }
        largest = largest.max(value.as_usize().unwrap_or(0));
    }
    check_count(largest)
}
