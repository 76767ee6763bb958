//! Gradient averaging by [`convoke_train::Ddp`] for training frameworks written in Rust.
//!
//! Each framework has a feature, none enabled by default: `candle`, `burn`. Both frameworks compute all
//! gradients in one function call. Buckets are therefore sent while the next buckets are filled, but not
//! while gradients are computed.
#![warn(missing_docs)]

#[cfg(feature = "burn")]
pub mod burn;
#[cfg(feature = "candle")]
pub mod candle;
