#![doc = include_str!("../../README.md")]

#[doc = include_str!("../../docs/reference/joining.md")]
pub mod joining {}

#[doc = include_str!("../../docs/guides/first-job.md")]
pub mod first_job {}
