//! Calibration against published facts: one recorded layer, and a whole small model.

mod end_to_end;
mod layer;
mod sliding;
mod support;
mod trials;
mod widths;
