//! Fault points, at which a test can make this process fail. Empty unless built with `fault-points`.

#[cfg(not(feature = "fault-points"))]
mod moments {
    /// Marks a fault point.
    #[inline(always)]
    pub(crate) fn moment(_point: &'static str, _seq: u64, _bytes: usize) {}
}

#[cfg(feature = "fault-points")]
mod moments {
    use std::sync::OnceLock;

    /// The fault point that the runtime has reached.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Moment {
        /// Name of the fault point. While a group forms: `recorded`, `meeting`, `greeted`, `welcomed`,
        /// `proving`, `connected`. In a collective: `calling`, `sent`, `received`, `moved`. In a message:
        /// `message sent`, `message received`. On failure: `failing`, `told`. On teardown: `leaving`,
        /// `left`.
        pub point: &'static str,
        /// Number of the collective or message.
        pub seq: u64,
        /// Bytes of it transferred so far, to or from one peer.
        pub bytes: usize,
    }

    static ACT: OnceLock<fn(Moment)> = OnceLock::new();

    /// Registers `act`, which the thread that reaches a fault point calls. Only the first registration
    /// counts.
    pub fn on_moment(act: fn(Moment)) {
        let _ = ACT.set(act);
    }

    pub(crate) fn moment(point: &'static str, seq: u64, bytes: usize) {
        if let Some(act) = ACT.get() {
            act(Moment { point, seq, bytes });
        }
    }
}

pub(crate) use moments::moment;
#[cfg(feature = "fault-points")]
pub use moments::{Moment, on_moment};
