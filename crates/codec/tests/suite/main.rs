//! Behaviour of the codec crate as its users rely on it.

mod attention;
mod distortion;
mod fixture;
mod pages;
mod rivals;
mod support;
mod views;
