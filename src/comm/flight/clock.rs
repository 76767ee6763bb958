//! The time of a record: nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
//!
//! A reading of that clock takes a tenth of a short call. So a thread reads the processor's time stamp counter
//! instead, and converts it by a reading of the clock that is at most [`REREAD_NS`] old. Linux computes the clock
//! from the counter too, if it trusts the counter. If it does not, a thread always reads the clock.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::fs;
use std::sync::OnceLock;

use nix::time::{ClockId, clock_gettime};

/// A thread reads the clock again after this time. The counter's frequency is then known to about 1 in 10^5.
const REREAD_NS: u64 = 10_000_000;
/// Two readings nearer to each other do not give the counter's frequency.
const LEAST_BASE_NS: u64 = 1_000_000;
/// Two readings further from each other do not either: the host may have slept between them.
const MOST_BASE_NS: u64 = 1_000_000_000;
/// The rates of counters with 10 GHz and with 100 MHz. Other rates come from a counter that jumped.
const RATES: std::ops::RangeInclusive<u64> = (1 << 32) / 10..=10 << 32;
/// Ticks within which the counter and the clock must be read, else the thread was interrupted between them.
const MOST_READING_TICKS: u64 = 2_000;

/// A reading of the counter and of the clock at the same time.
#[derive(Debug, Clone, Copy)]
struct Reading {
    ticks: u64,
    ns: u64,
}

/// The clock of a thread.
#[derive(Debug, Clone, Copy)]
struct Clock {
    last: Reading,
    /// Nanoseconds per tick, as a fraction of 2^32; 0 if it is not known.
    rate: u64,
    /// Ticks after `last` in which the time is computed.
    valid: u64,
}

impl Clock {
    const NEW: Self = Self { last: Reading { ticks: 0, ns: 0 }, rate: 0, valid: 0 };

    /// Returns the time at `ticks`; `None` if the clock must be read.
    #[inline]
    fn at(&self, ticks: u64) -> Option<u64> {
        let passed = ticks.wrapping_sub(self.last.ticks);
        // No overflow: `valid` is at most REREAD_NS / rate, so the product is at most REREAD_NS times 2^32.
        (passed < self.valid).then(|| self.last.ns + ((passed * self.rate) >> 32))
    }

    /// Takes a reading, which took `taken` ticks. Returns its time, which is not before one that [`Self::at`] returned.
    fn reread(&mut self, reading: Reading, taken: u64) -> u64 {
        let Self { last, rate, valid } = *self;
        let (ticks, ns) = (reading.ticks.wrapping_sub(last.ticks), reading.ns.saturating_sub(last.ns));
        let is_exact = taken < MOST_READING_TICKS;
        if rate == 0 && last.ticks != 0 && ns < LEAST_BASE_NS {
            return reading.ns;
        }
        let measured = if (LEAST_BASE_NS..MOST_BASE_NS).contains(&ns) && ticks > 0 {
            u64::try_from((u128::from(ns) << 32) / u128::from(ticks)).unwrap_or(0)
        } else {
            rate
        };
        // A counter whose frequency changes is not trusted until it was measured again.
        let is_steady = rate == 0 || measured.abs_diff(rate) <= rate / 100;
        let is_known = is_exact && is_steady && RATES.contains(&measured);
        *self = Self {
            last: if is_exact || last.ticks == 0 { reading } else { last },
            rate: if is_known { measured } else { 0 },
            valid: if is_known { ((u128::from(REREAD_NS) << 32) / u128::from(measured)) as u64 } else { 0 },
        };
        // The computed time may be ahead by the error of the frequency.
        let computed = last.ns + ((u128::from(valid) * u128::from(rate)) >> 32) as u64;
        reading.ns.max(computed.min(reading.ns + REREAD_NS / 1000))
    }
}

/// Returns the nanoseconds of CLOCK_MONOTONIC.
#[inline]
pub(crate) fn now_ns() -> u64 {
    thread_local!(static CLOCK: Cell<Clock> = const { Cell::new(Clock::NEW) });
    CLOCK.with(|clock| clock.get().at(counter()).unwrap_or_else(|| read(clock)))
}

#[cold]
fn read(clock: &Cell<Clock>) -> u64 {
    static IS_TRUSTED: OnceLock<bool> = OnceLock::new();
    if !*IS_TRUSTED.get_or_init(is_trusted) {
        return read_clock();
    }
    let ticks = counter();
    let ns = read_clock();
    let mut next = clock.get();
    let ns = next.reread(Reading { ticks, ns }, counter().wrapping_sub(ticks));
    clock.set(next);
    ns
}

fn read_clock() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// Returns whether Linux computes its clock from the counter that [`counter`] reads. Linux does so only if the
/// counter has a constant frequency and is equal on all cores.
fn is_trusted() -> bool {
    cfg!(target_arch = "x86_64")
        && fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource")
            .is_ok_and(|source| source.trim_end() == "tsc")
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every processor of this architecture has the instruction. Linux lets programs use it, unless a program
    // forbids it to itself (PR_SET_TSC), which then dies as it asked for.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock whose counter has 3 ticks per nanosecond, after two readings.
    fn known() -> Clock {
        let mut clock = Clock::NEW;
        assert_eq!(clock.at(5), None);
        assert_eq!(clock.reread(Reading { ticks: 300, ns: 1_000 }, 50), 1_000);
        assert_eq!(clock.at(301), None);
        assert_eq!(clock.reread(Reading { ticks: 6_000_300, ns: 2_001_000 }, 50), 2_001_000);
        clock
    }

    #[test]
    fn time_between_readings_is_computed() {
        let clock = known();
        for ns in [0, 1, 1_000, REREAD_NS - 10] {
            let time = clock.at(6_000_300 + 3 * ns).unwrap();
            assert!(time.abs_diff(2_001_000 + ns) <= 1, "{time} {ns}");
        }
        assert_eq!(clock.at(6_000_300 + 3 * (REREAD_NS + 10)), None);
        // A counter that goes back, as after a move of the virtual machine.
        assert_eq!(clock.at(6_000_200), None);
    }

    #[test]
    fn counter_frequency_is_measured_although_readings_are_frequent() {
        let mut clock = Clock::NEW;
        for ns in (1..1_200).map(|step| step * 1_000) {
            clock.reread(Reading { ticks: 3 * ns, ns }, 50);
        }
        assert!(clock.at(3 * 1_200_000).unwrap().abs_diff(1_200_000) <= 1);
    }

    #[test]
    fn interrupted_reading_does_not_set_the_clock() {
        let mut clock = known();
        let late = Reading { ticks: 60_000_300, ns: 30_001_000 };
        assert_eq!(clock.reread(late, MOST_READING_TICKS), 30_001_000);
        assert_eq!(clock.at(60_000_301), None);
    }

    #[test]
    fn changed_frequency_is_measured_again() {
        let mut clock = known();
        let (first, second) =
            (Reading { ticks: 66_000_300, ns: 62_001_000 }, Reading { ticks: 69_000_300, ns: 65_001_000 });
        assert_eq!(clock.reread(first, 50), 62_001_000);
        assert_eq!(clock.at(66_000_301), None);
        assert_eq!(clock.reread(second, 50), 65_001_000);
        assert!(clock.at(69_000_300 + 1_000).unwrap().abs_diff(65_002_000) <= 1);
    }

    #[test]
    fn sleeping_host_leaves_the_frequency_as_it_was() {
        let mut clock = known();
        assert_eq!(clock.reread(Reading { ticks: 3_000_000_000_000, ns: 3_000_000_000 }, 50), 3_000_000_000);
        assert!(clock.at(3_000_000_000_000 + 3_000).unwrap().abs_diff(3_000_001_000) <= 1);
    }

    #[test]
    fn time_agrees_with_the_system_and_never_goes_back() {
        let mut last = 0;
        for _ in 0..200_000 {
            let (before, now, after) = (read_clock(), now_ns(), read_clock());
            assert!(before <= now + 20_000 && now <= after + 20_000, "{before} {now} {after}");
            assert!(now + 1_000 >= last, "{last} {now}");
            last = now;
        }
    }
}
