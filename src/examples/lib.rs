#![doc = include_str!("../../README.md")]

#[doc = include_str!("../../docs/ways-in.md")]
pub mod ways_in {}

#[doc = include_str!("../../docs/first-job.md")]
pub mod first_job {}
