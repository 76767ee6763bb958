#![doc = include_str!("../../README.md")]

#[doc = include_str!("../../docs/ways-in.md")]
pub mod ways_in {}
