//! Rotations for the 2-bit key-value cache.
//!
//! [`zoo`] reads and writes the rotation files of the public RotationZoo.
//!
//! Invariant: this crate knows files and matrices, never requests or serving.

pub mod zoo;
