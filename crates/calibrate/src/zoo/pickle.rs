//! A pickle machine that can only build data.
//!
//! It runs the opcodes `torch.save` emits (protocols 2 to 5) on an arena of nodes: the stack, the
//! memo and every container hold node numbers, so shared references cost nothing and a cycle is
//! just two numbers. `GLOBAL` looks names up in a closed list and `REDUCE` has one hand-written
//! meaning per name; there is no import and no call.
//!
//! Invariant: memory is linear in [`Limits::operations`] plus the pickle's own bytes, and the tree
//! made at the end in [`Limits::values`]; a cycle or a doubling chain of references hits one of the
//! two.

use std::collections::HashMap;
use std::sync::Arc;

use super::nodes::{Global, Node, NodeId, StorageRef, shorten};
use super::value::{TensorView, Value};
use super::{Limits, PickleError, ZooError};

/// More dimensions than any tensor here has; keeps shape handling trivially small.
const MAX_RANK: usize = 8;

type Fault<T> = Result<T, PickleError>;

/// Builds the value of `pickle`. `storage_bytes` tells how large a storage really is in the
/// archive, `None` if it is missing.
pub fn unpickle(
    pickle: &[u8],
    storage_bytes: &dyn Fn(&str) -> Option<usize>,
    limits: &Limits,
) -> Result<Value, ZooError> {
    let mut machine = Machine {
        input: pickle,
        at: 0,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        storage_bytes,
        limits,
    };
    let value = machine.run().and_then(|root| machine.tree(root));
    value.map_err(|fault| ZooError::Pickle { at: machine.at.min(pickle.len()), fault })
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<NodeId>,
    /// Stack heights; a pop never goes below the last one.
    marks: Vec<usize>,
    memo: HashMap<u32, NodeId>,
    storage_bytes: &'a dyn Fn(&str) -> Option<usize>,
    limits: &'a Limits,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Fault<NodeId> {
        let what = "opcodes";
        for _ in 0..self.limits.operations {
            let opcode = self.byte()?;
            if opcode == b'.' {
                let root = self.pop()?;
                let trailing = self.input.len() - self.at;
                return if trailing == 0 { Ok(root) } else { Err(PickleError::TrailingBytes(trailing)) };
            }
            self.step(opcode)?;
        }
        Err(PickleError::Limit { what, limit: self.limits.operations })
    }

    fn step(&mut self, opcode: u8) -> Fault<()> {
        match opcode {
            0x80 => match self.byte()? {
                2..=5 => {}
                other => return Err(PickleError::Protocol(other)),
            },
            // FRAME announces a length that only matters to buffered readers.
            0x95 => drop(self.take(8)?),

            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.pop()?;
                self.stack.extend([top, top]);
            }

            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Node::Dict(Vec::new()));
                self.insert(items)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.insert(vec![key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.insert(items)?;
            }

            b'q' => {
                let slot = self.byte()?.into();
                self.remember(slot)?;
            }
            b'r' => {
                let slot = u32::from_le_bytes(self.array()?);
                self.remember(slot)?;
            }
            0x94 => {
                let slot = self.memo.len() as u32;
                self.remember(slot)?;
            }
            b'h' => {
                let slot = self.byte()?.into();
                self.recall(slot)?;
            }
            b'j' => {
                let slot = u32::from_le_bytes(self.array()?);
                self.recall(slot)?;
            }

            b'R' => self.reduce()?,
            b'Q' => self.persistent()?,
            other => {
                let node = self.new_node(other)?;
                self.push(node);
            }
        }
        Ok(())
    }

    /// The node that an opcode makes and pushes.
    fn new_node(&mut self, opcode: u8) -> Fault<Node> {
        Ok(match opcode {
            b'N' => Node::None,
            0x88 => Node::Bool(true),
            0x89 => Node::Bool(false),
            b'J' => Node::Int(i32::from_le_bytes(self.array()?).into()),
            b'K' => Node::Int(self.byte()?.into()),
            b'M' => Node::Int(u16::from_le_bytes(self.array()?).into()),
            0x8a => {
                let length = self.byte()?.into();
                self.long(length)?
            }
            0x8b => {
                let length = u32::from_le_bytes(self.array()?) as usize;
                self.long(length)?
            }
            b'G' => Node::Float(f64::from_be_bytes(self.array()?)),
            0x8c => {
                let length = self.byte()?.into();
                self.text(length)?
            }
            b'X' => {
                let length = u32::from_le_bytes(self.array()?);
                self.text(length.into())?
            }
            0x8d => {
                let length = u64::from_le_bytes(self.array()?);
                self.text(length)?
            }
            b']' => Node::List(Vec::new()),
            b'l' => Node::List(self.pop_mark()?),
            b')' => Node::Tuple(Vec::new()),
            b't' => Node::Tuple(self.pop_mark()?),
            0x85..=0x87 => {
                let mut items = (0..opcode - 0x84).map(|_| self.pop()).collect::<Fault<Vec<NodeId>>>()?;
                items.reverse();
                Node::Tuple(items)
            }
            b'}' => Node::Dict(Vec::new()),
            b'c' => Node::Global(Global::lookup(self.line()?, self.line()?)?),
            0x93 => {
                let name = self.pop_str()?;
                Node::Global(Global::lookup(&self.pop_str()?, &name)?)
            }
            other => return Err(PickleError::Opcode(other)),
        })
    }

    // ---- input ----

    fn take(&mut self, length: u64) -> Fault<&'a [u8]> {
        let rest = &self.input[self.at..];
        let length =
            usize::try_from(length).ok().filter(|&n| n <= rest.len()).ok_or(PickleError::Truncated)?;
        self.at += length;
        Ok(&rest[..length])
    }

    fn array<const N: usize>(&mut self) -> Fault<[u8; N]> {
        self.take(N as u64)?.try_into().map_err(|_| PickleError::Truncated)
    }

    fn byte(&mut self) -> Fault<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn line(&mut self) -> Fault<&'a str> {
        let rest = &self.input[self.at..];
        let end = rest.iter().position(|&b| b == b'\n').ok_or(PickleError::Truncated)?;
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| PickleError::NotUtf8)
    }

    fn text(&mut self, length: u64) -> Fault<Node> {
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| PickleError::NotUtf8)?;
        Ok(Node::Str(text.into()))
    }

    /// A little-endian two's complement integer of any length up to 8 bytes.
    fn long(&mut self, length: usize) -> Fault<Node> {
        if length > 8 {
            return Err(PickleError::WideInteger(length));
        }
        let bytes = self.take(length as u64)?;
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        wide[..length].copy_from_slice(bytes);
        Ok(Node::Int(i64::from_le_bytes(wide)))
    }

    // ---- stack and memo ----

    fn push(&mut self, node: Node) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    fn pop(&mut self) -> Fault<NodeId> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Fault<Vec<NodeId>> {
        let height = self.marks.pop().ok_or(PickleError::NoMark)?;
        Ok(self.stack.split_off(height))
    }

    fn top(&self) -> Fault<NodeId> {
        if self.stack.len() <= self.marks.last().copied().unwrap_or(0) {
            return Err(PickleError::StackUnderflow);
        }
        self.stack.last().copied().ok_or(PickleError::StackUnderflow)
    }

    fn pop_str(&mut self) -> Fault<Arc<str>> {
        let id = self.pop()?;
        self.str_at(id)
    }

    fn append(&mut self, items: Vec<NodeId>) -> Fault<()> {
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::List(list) => list.extend(items),
            other => return Err(other.is_not("a list")),
        }
        Ok(())
    }

    fn insert(&mut self, items: Vec<NodeId>) -> Fault<()> {
        if !items.len().is_multiple_of(2) {
            return Err(PickleError::Type { expected: "key and value pairs", found: "an odd number" });
        }
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::Dict(dict) => dict.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            other => return Err(other.is_not("a dict")),
        }
        Ok(())
    }

    fn remember(&mut self, slot: u32) -> Fault<()> {
        let top = self.top()?;
        self.memo.insert(slot, top);
        Ok(())
    }

    fn recall(&mut self, slot: u32) -> Fault<()> {
        let id = *self.memo.get(&slot).ok_or(PickleError::EmptyMemo(slot))?;
        self.stack.push(id);
        Ok(())
    }

    // ---- the only meanings REDUCE and BINPERSID have ----

    fn str_at(&self, id: NodeId) -> Fault<Arc<str>> {
        match &self.nodes[id] {
            Node::Str(text) => Ok(text.clone()),
            other => Err(other.is_not("a string")),
        }
    }

    fn tuple_at(&self, id: NodeId) -> Fault<&[NodeId]> {
        match &self.nodes[id] {
            Node::Tuple(items) => Ok(items),
            other => Err(other.is_not("a tuple")),
        }
    }

    /// A size, offset or stride: an integer that is not negative.
    fn count_at(&self, id: NodeId, what: &str) -> Fault<usize> {
        match &self.nodes[id] {
            Node::Int(n) => usize::try_from(*n)
                .map_err(|_| PickleError::Tensor(format!("{what} is {n}, must be 0 or more"))),
            other => Err(other.is_not("an integer")),
        }
    }

    fn counts_at(&self, id: NodeId, what: &str) -> Fault<Vec<usize>> {
        let items = self.tuple_at(id)?;
        if items.len() > MAX_RANK {
            return Err(PickleError::Limit { what: "dimensions", limit: MAX_RANK });
        }
        items.iter().map(|&item| self.count_at(item, what)).collect()
    }

    fn reduce(&mut self) -> Fault<()> {
        let arguments = self.pop()?;
        let callable = self.pop()?;
        let Node::Global(global) = self.nodes[callable] else {
            return Err(self.nodes[callable].is_not("an allowed function"));
        };
        let arguments = self.tuple_at(arguments)?;
        match (global, arguments) {
            (Global::OrderedDict, []) => self.push(Node::Dict(Vec::new())),
            (Global::RebuildParameter, &[data, _requires_grad, _hooks]) => {
                if !matches!(self.nodes[data], Node::Tensor(_)) {
                    return Err(self.nodes[data].is_not("a tensor"));
                }
                self.stack.push(data);
            }
            (Global::RebuildTensor, &[storage, offset, shape, strides, _requires_grad, _hooks]) => {
                let view = self.view(storage, offset, shape, strides)?;
                self.push(Node::Tensor(Arc::new(view)));
            }
            (global, arguments) => {
                let count = arguments.len();
                return Err(PickleError::Tensor(format!(
                    "{global:?} cannot be built from {count} arguments"
                )));
            }
        }
        Ok(())
    }

    fn view(&self, storage: NodeId, offset: NodeId, shape: NodeId, strides: NodeId) -> Fault<TensorView> {
        let Node::Storage(storage) = &self.nodes[storage] else {
            return Err(self.nodes[storage].is_not("a storage"));
        };
        let view = TensorView {
            dtype: storage.dtype,
            offset: self.count_at(offset, "storage offset")?,
            shape: self.counts_at(shape, "dimension")?,
            strides: self.counts_at(strides, "stride")?,
            storage: storage.key.clone(),
        };
        if view.shape.len() != view.strides.len() {
            let (shape, strides) = (&view.shape, &view.strides);
            return Err(PickleError::Tensor(format!(
                "shape {shape:?} and strides {strides:?} differ in length"
            )));
        }
        match (view.numel(), view.end()) {
            (Some(_), Some(end)) if end <= storage.numel => Ok(view),
            _ => Err(PickleError::Tensor(format!(
                "view of shape {:?}, strides {:?}, offset {} reaches beyond storage {:?} of {} elements",
                view.shape,
                view.strides,
                view.offset,
                shorten(&storage.key),
                storage.numel
            ))),
        }
    }

    fn persistent(&mut self) -> Fault<()> {
        let id = self.pop()?;
        let &[tag, class, key, _location, numel] = self.tuple_at(id)? else {
            return Err(PickleError::Tensor("a persistent id must be a 5-tuple".into()));
        };
        if &*self.str_at(tag)? != "storage" {
            return Err(PickleError::Tensor("a persistent id must begin with 'storage'".into()));
        }
        let Node::Global(Global::Storage(dtype)) = self.nodes[class] else {
            return Err(self.nodes[class].is_not("a storage class"));
        };
        let key = self.str_at(key)?;
        let numel = self.count_at(numel, "storage size")?;
        let shown = shorten(&key);
        let present = (self.storage_bytes)(&key)
            .ok_or_else(|| PickleError::Tensor(format!("storage {shown:?} is missing from the archive")))?;
        if numel.checked_mul(dtype.size()) != Some(present) {
            return Err(PickleError::Tensor(format!(
                "storage {shown:?} is declared as {numel} elements of {dtype:?} but holds {present} bytes"
            )));
        }
        self.push(Node::Storage(Arc::new(StorageRef { dtype, key, numel })));
        Ok(())
    }

    // ---- the finished tree ----

    fn tree(&self, root: NodeId) -> Fault<Value> {
        let mut budget = self.limits.values;
        self.grow(root, self.limits.depth, &mut budget)
    }

    fn grow(&self, id: NodeId, depth: usize, budget: &mut usize) -> Fault<Value> {
        let depth = depth
            .checked_sub(1)
            .ok_or(PickleError::Limit { what: "levels of nesting", limit: self.limits.depth })?;
        *budget =
            budget.checked_sub(1).ok_or(PickleError::Limit { what: "values", limit: self.limits.values })?;
        // Collected without a size hint: a doubling chain must hit the budget before it allocates.
        let mut all = |ids: &[NodeId]| -> Fault<Vec<Value>> {
            let mut grown = Vec::new();
            for &id in ids {
                grown.push(self.grow(id, depth, budget)?);
            }
            Ok(grown)
        };
        Ok(match &self.nodes[id] {
            Node::None => Value::None,
            Node::Bool(b) => Value::Bool(*b),
            Node::Int(n) => Value::Int(*n),
            Node::Float(x) => Value::Float(*x),
            Node::Str(text) => Value::Str(text.clone()),
            Node::Tensor(view) => Value::Tensor(view.clone()),
            Node::List(ids) => Value::List(all(ids)?),
            Node::Tuple(ids) => Value::Tuple(all(ids)?),
            Node::Dict(pairs) => {
                let mut items = Vec::new();
                for &(key, value) in pairs {
                    items.push((self.grow(key, depth, budget)?, self.grow(value, depth, budget)?));
                }
                Value::Dict(items)
            }
            bare @ (Node::Storage(_) | Node::Global(_)) => return Err(bare.is_not("plain data")),
        })
    }
}
