//! Carries out plans.
pub(crate) mod buffer;
pub(crate) mod run;
